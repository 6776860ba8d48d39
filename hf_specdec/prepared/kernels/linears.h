// Operations on one, two and three linear layers of one input, defined by a function `linears<T>(input, weights, biases,
// outputs)`.

#pragma once

#include <initializer_list>

#include "tensors.h"

using Tensors = std::initializer_list<Given>;
using Results = std::initializer_list<Handle*>;

#define LINEAR_OPERATIONS(name, linears)                                                                            \
  NAMED(name)(Handle input, Handle weight, Handle* bias, Handle* output) {                                          \
    return reported([=] { linears<NUMBER>(input, {weight}, {bias}, {output}); });                                   \
  }                                                                                                                 \
  NAMED(name##_2)(Handle input, Handle w0, Handle w1, Handle* b0, Handle* b1, Handle* y0, Handle* y1) {             \
    return reported([=] { linears<NUMBER>(input, {w0, w1}, {b0, b1}, {y0, y1}); });                                 \
  }                                                                                                                 \
  NAMED(name##_3)(Handle input, Handle w0, Handle w1, Handle w2, Handle* b0, Handle* b1, Handle* b2, Handle* y0,    \
                  Handle* y1, Handle* y2) {                                                                         \
    return reported([=] { linears<NUMBER>(input, {w0, w1, w2}, {b0, b1, b2}, {y0, y1, y2}); });                     \
  }                                                                                                                 \
  STABLE_TORCH_LIBRARY_FRAGMENT(hf_specdec, library) {                                                              \
    library.def(OPERATION(#name) "(Tensor input, Tensor weight, Tensor? bias) -> Tensor");                          \
    library.def(OPERATION(#name "_2") "(Tensor input, Tensor w0, Tensor w1, Tensor? b0, Tensor? b1)"                \
                " -> (Tensor, Tensor)");                                                                            \
    library.def(OPERATION(#name "_3") "(Tensor input, Tensor w0, Tensor w1, Tensor w2, Tensor? b0, Tensor? b1,"     \
                " Tensor? b2) -> (Tensor, Tensor, Tensor)");                                                        \
  }                                                                                                                 \
  STABLE_TORCH_LIBRARY_IMPL(hf_specdec, CPU, library) {                                                             \
    library.impl(OPERATION(#name), TORCH_BOX((&Operation<FUNCTION(name), 1, Tensor, Tensor, Optional>::run)));      \
    library.impl(OPERATION(#name "_2"), TORCH_BOX((&Operation<FUNCTION(name##_2), 2, Tensor, Tensor, Tensor,        \
                                                              Optional, Optional>::run)));                          \
    library.impl(OPERATION(#name "_3"), TORCH_BOX((&Operation<FUNCTION(name##_3), 3, Tensor, Tensor, Tensor, Tensor, \
                                                              Optional, Optional, Optional>::run)));                \
  }
