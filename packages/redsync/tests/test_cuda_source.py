"""The CUDA source without a GPU: it compiles, and run by one thread on a CPU it does what Numba's pass does."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch

from hocket_redsync.kernels import Memory, Ranking, Update, gpu, kernels_for

TESTS = Path(__file__).parent
CPU = kernels_for(torch.device("cpu"))


@pytest.mark.skipif(shutil.which("nvcc") is None, reason="no nvcc on PATH")
def test_the_kernels_compile_without_a_warning(tmp_path: Path) -> None:
    command = ["nvcc", *gpu.COMPILE_OPTIONS, "-cubin", "-arch=sm_90", "-Werror", "all-warnings"]
    done = subprocess.run(
        [*command, "-o", str(tmp_path / "advance.cubin"), str(gpu.SOURCE)],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
def test_what_cupy_compiles_with_compiles_the_kernels_without_a_warning(architecture: str) -> None:
    nvrtc = _nvrtc()
    if nvrtc is None:
        pytest.skip("nvidia-cuda-nvrtc is not installed")
    program, size = ctypes.c_void_p(), ctypes.c_size_t()
    source = gpu.SOURCE.read_bytes()
    assert nvrtc.nvrtcCreateProgram(ctypes.byref(program), source, b"advance.cu", 0, None, None) == 0
    options = [f"-arch={architecture}".encode(), *(option.encode() for option in gpu.COMPILE_OPTIONS)]
    status = nvrtc.nvrtcCompileProgram(program, len(options), (ctypes.c_char_p * len(options))(*options))
    nvrtc.nvrtcGetProgramLogSize(program, ctypes.byref(size))
    log = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetProgramLog(program, log)
    assert (status, log.value.decode()) == (0, "")
    nvrtc.nvrtcGetCUBINSize(program, ctypes.byref(size))
    cubin = ctypes.create_string_buffer(size.value)
    nvrtc.nvrtcGetCUBIN(program, cubin)
    for name in (b"advance_f32", b"advance_f64", b"find_nonfinite_f32", b"find_nonfinite_f64"):
        assert name in cubin.raw


def _nvrtc() -> ctypes.CDLL | None:
    """Return the library of the wheel `nvidia-cuda-nvrtc`, which needs no GPU."""
    nvidia = find_spec("nvidia")
    for folder in nvidia.submodule_search_locations or [] if nvidia else []:
        for builtins in Path(folder).glob("cu*/lib/libnvrtc-builtins.so.*"):
            ctypes.CDLL(str(builtins), ctypes.RTLD_GLOBAL)
            [library] = builtins.parent.glob("libnvrtc.so.*")
            return ctypes.CDLL(str(library))
    return None


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    if shutil.which("g++") is None:
        pytest.skip("no g++ on PATH")
    built = tmp_path_factory.mktemp("cuda") / "advance.so"
    command = ["g++", "-std=c++17", "-O2", "-ffp-contract=off", "-shared", "-fPIC", "-Wno-unknown-pragmas"]
    command += ["-include", str(TESTS / "one_lane.h"), "-x", "c++", str(gpu.SOURCE), "-o", str(built)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(built))


UPDATES = {
    "pick": None,
    "plain": Update(),
    "momentum": Update(momentum=0.9),
    "nesterov": Update(momentum=0.9, nesterov=True),
    "decay": Update(momentum=0.9, decay=0.01, parameter=torch.zeros(0)),  # in the test its own
}


@pytest.mark.parametrize("ranking", Ranking)
@pytest.mark.parametrize("name", UPDATES)
@pytest.mark.parametrize(
    ("dtype", "real"), [(torch.float32, ctypes.c_float), (torch.float64, ctypes.c_double)]
)
def test_the_pass_is_that_of_the_cpu(
    library: ctypes.CDLL, dtype: torch.dtype, real: type, name: str, ranking: Ranking
) -> None:
    n, first, capacity = 3000, 70, 400
    generator = torch.Generator().manual_seed(0)
    given, velocity, residual, parameter = torch.randn(4, n, generator=generator, dtype=dtype)
    update = UPDATES[name]
    decays = update is not None and update.decay > 0
    if update is not None and decays:
        update = replace(update, parameter=parameter)
    floor = int(
        ranking.keys(np.array([-2.0 if ranking is Ranking.SMALLEST else 2.0], residual.numpy().dtype))[0]
    )

    own_velocity, own_residual = velocity.clone(), residual.clone()
    indices, values = np.zeros(capacity, np.int32), np.zeros(capacity, residual.numpy().dtype)
    count = ctypes.c_int(0)
    key = ctypes.c_int if dtype is torch.float32 else ctypes.c_longlong
    flip, mask = ranking.flip_and_mask(dtype.itemsize)
    mode = list(UPDATES).index(name) if name != "decay" else 2
    getattr(library, "advance_f32" if dtype is torch.float32 else "advance_f64")(
        ctypes.c_int(mode),
        *(ctypes.c_void_p(tensor.data_ptr()) for tensor in (given, own_velocity, own_residual)),
        ctypes.c_void_p(parameter.data_ptr() if decays else 0),
        real(0.9),
        real(0.01),
        ctypes.c_longlong(n),
        *(key(number) for number in (flip, mask, floor)),
        ctypes.c_int(first),
        ctypes.c_void_p(indices.ctypes.data),
        ctypes.c_void_p(values.ctypes.data),
        ctypes.c_int(capacity),
        ctypes.byref(count),
    )
    [found] = CPU.collect(
        [CPU.advance(Memory(given, residual, velocity, first), update, ranking, floor, capacity)]
    )
    assert torch.equal(own_residual, residual)
    assert torch.equal(own_velocity, velocity)
    assert count.value == found.count
    order = np.argsort(indices[: len(found.indices)])
    if found.complete:
        np.testing.assert_array_equal(indices[order], found.indices)
        np.testing.assert_array_equal(values[order], found.values)


@pytest.mark.parametrize("bad", [None, np.nan, np.inf, -np.inf])
def test_nonfinite_values_are_found(library: ctypes.CDLL, bad: float | None) -> None:
    data = torch.full((100,), 3e38)
    if bad is not None:
        data[71] = bad
    found = ctypes.c_int(0)
    arguments = (ctypes.c_int(0x7FFFFFFF), ctypes.c_int(0x7F800000), ctypes.byref(found))
    library.find_nonfinite_f32(ctypes.c_void_p(data.data_ptr()), ctypes.c_longlong(100), *arguments)
    assert bool(found.value) == (bad is not None) == (not CPU.is_finite(data))


def test_without_cupy_the_error_says_what_to_install() -> None:
    try:
        import cupy  # noqa: F401
    except ImportError:
        with pytest.raises(ValueError, match=r"pip install .*redsync\[cuda1\d\]'"):
            gpu._module()
    else:
        pytest.skip("CuPy is installed")
