"""The kernels' C++ by itself: every file compiles alone, without a warning, and reads and writes what is its own."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch.utils.cpp_extension import include_paths

from hf_specdec.prepared.own_code import KERNELS

pytestmark = pytest.mark.compiles

HELPERS = Path(__file__).parents[1] / "helpers"
LIBRARIES = Path(torch.__file__).parent / "lib"
AVX2 = ("-march=haswell", "-DCPU_CAPABILITY=AVX2", "-DCPU_CAPABILITY_AVX2")
AVX512 = ("-march=sapphirerapids", "-DCPU_CAPABILITY=AVX512", "-DCPU_CAPABILITY_AVX512")
COMPILERS = [compiler for compiler in ("g++", "clang++") if shutil.which(compiler)]
# AVX-512 of the processor at hand, and tiles in software.
TILES = ("-march=native", "-mno-amx-int8", "-include", str(HELPERS / "emulated_amx.h"), *AVX512[1:])
FORMS = {"AVX2": AVX2} | ({"AVX-512": TILES} if torch.backends.cpu.get_cpu_capability() == "AVX512" else {})


def _compile(compiler: str, *options: str) -> None:
    headers = [f"-isystem{path}" for path in include_paths()]
    python = f"-isystem{Path(os.__file__).parents[2] / 'include' / Path(os.__file__).parent.name}"
    command = [compiler, "-std=c++20", "-fopenmp", "-fno-math-errno", *headers, python, *options]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("compiler", COMPILERS)
def test_every_file_compiles_alone(compiler: str) -> None:
    # Headers have functions that a file of its own does not call; vectors lose attributes as arguments of templates.
    warnings = ("-Werror", "-Wall", "-Wno-unused", "-Wno-ignored-attributes", "-Wno-unknown-warning-option")
    for file in sorted(KERNELS.iterdir()):
        _compile(compiler, "-fsyntax-only", *warnings, *AVX512, "-x", "c++", "-include", str(file), os.devnull)


@pytest.mark.parametrize("form", FORMS)
def test_memory_and_behaviour_are_defined(form: str, tmp_path) -> None:
    program = tmp_path / "check"
    # The address sanitizer finds what the checks that are left out would, which take as long to compile as all others.
    found_anyway = "-fno-sanitize=null,object-size,pointer-overflow"
    sanitized = ("-O0", "-fsanitize=address,undefined", found_anyway, "-fno-sanitize-recover=all")
    # A third of the code to compile: functions are called instead of inlined, and so are the checks of addresses.
    called = ("-Dalways_inline=unused", "--param", "asan-instrumentation-with-call-threshold=0")
    links = [f"-L{LIBRARIES}", f"-Wl,-rpath,{LIBRARIES}", "-ltorch", "-ltorch_cpu", "-lc10"]
    check = Path(__file__).with_name("kernels_check.cpp")
    _compile("g++", *sanitized, *called, *FORMS[form], f"-I{KERNELS}", str(check), "-o", str(program), *links)
    # Libraries that are not sanitized keep memory, and register functions that are.
    options = {"ASAN_OPTIONS": "detect_leaks=0:detect_odr_violation=0", "OMP_NUM_THREADS": "2"}
    done = subprocess.run([program], capture_output=True, text=True, env=os.environ | options)
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout == "as plain loops have it\n"
