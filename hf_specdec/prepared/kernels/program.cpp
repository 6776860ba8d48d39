// A step as a list of segments, called one after another without Python between them.

#include <Python.h>

#include <torch/csrc/inductor/aoti_torch/c/shim.h>

#include <cstdint>
#include <exception>
#include <vector>

namespace {

using Handle = AtenTensorHandle;

// Inductor's function for a segment, which takes over the handles of its inputs and returns those of its outputs.
using Function = void (*)(Handle* inputs, Handle* outputs);

struct Segment {
  Function run;
  int64_t inputs, outputs;
  const int64_t* sources;  // which values the inputs are
};

// Values are numbered: constants first, then what the step is given, then the outputs of its segments.
struct Program {
  const Segment* segments;
  int64_t count;
  Handle* constants;
  int64_t constant_count;
  const int64_t* results;
  int64_t result_count;
};

// Tensors that are let go of in the end.
struct Values {
  ~Values() {
    for (Handle handle : handles)
      if (handle) aoti_torch_delete_tensor_object(handle);
  }
  std::vector<Handle> handles;
};

Handle again(Handle handle) {
  Handle copy = nullptr;
  aoti_torch_new_tensor_handle(handle, &copy);
  return copy;
}

PyObject* run(const Program& program, PyObject* given) {
  Values values;
  for (Py_ssize_t i = 0; i < PyList_GET_SIZE(given); ++i)
    values.handles.push_back(static_cast<Handle>(PyCapsule_GetPointer(PyList_GET_ITEM(given, i), nullptr)));
  const auto value = [&](int64_t at) {
    return at < program.constant_count ? program.constants[at] : values.handles[at - program.constant_count];
  };
  std::vector<Handle> inputs, outputs;
  for (const Segment* segment = program.segments; segment < program.segments + program.count; ++segment) {
    inputs.clear();
    for (int64_t i = 0; i < segment->inputs; ++i) inputs.push_back(again(value(segment->sources[i])));
    outputs.assign(segment->outputs, nullptr);
    segment->run(inputs.data(), outputs.data());
    values.handles.insert(values.handles.end(), outputs.begin(), outputs.end());
  }
  PyObject* results = PyList_New(program.result_count);
  for (int64_t i = 0; i < program.result_count; ++i)
    PyList_SET_ITEM(results, i, PyCapsule_New(again(value(program.results[i])), nullptr, nullptr));
  return results;
}

}  // namespace

// The results of a program, given a list of what its step is given: handles in capsules, which are taken over.
extern "C" PyObject* hf_specdec_run(const Program* program, PyObject* given) {
  try {
    return run(*program, given);
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  } catch (...) {
    PyErr_SetString(PyExc_RuntimeError, "a compiled step failed");
  }
  return nullptr;
}

extern "C" void hf_specdec_release(Handle* handles, int64_t count) {
  for (int64_t i = 0; i < count; ++i) aoti_torch_delete_tensor_object(handles[i]);
}
