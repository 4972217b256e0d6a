"""The registry and the launcher against the stub driver: what is loaded when, what a launch passes, what errors say."""

from __future__ import annotations

import os
import signal
import struct
import subprocess
import threading

import numpy as np
import pytest

from jax_fa4.ffi import launch
from jax_fa4.kernels.plan import Extent, Parameter, Role, SharedBuffer

from .conftest import Stub, build_programs
from .kernels_for_tests import fill_plan, stub_binary


def run(content_hash: str, buffer: np.ndarray, value: float = 1.0, ordinal: int = 0) -> None:
    launch.native().launch(
        "stub", content_hash, ordinal, [], [buffer.ctypes.data], [buffer.size, 1, 1, 1], [value], stream=0
    )


def test_loads_once_for_each_device(stub: Stub) -> None:
    content_hash = launch.register(stub_binary(fill_plan()))
    for ordinal in (0, 1, 0, 1, 1):
        launch.native().load("stub", content_hash, ordinal)
    assert stub.count("cuLibraryLoadData") == 2
    buffer = np.zeros(300, np.float32)
    run(content_hash, buffer, 2.5, ordinal=1)
    assert (buffer == 2.5).all()
    assert stub.count("cuLibraryLoadData") == 2
    assert "device=1" in stub.launches()[-1]


def test_execution_never_loads(stub: Stub) -> None:
    plan = fill_plan()
    content_hash = launch.register(stub_binary(plan))
    with pytest.raises(RuntimeError, match=f"{plan.key}.*not initialised"):
        run(content_hash, np.zeros(4, np.float32))
    assert stub.count("cuLibraryLoadData") == 0


def test_launch_attributes(stub: Stub) -> None:
    plan = fill_plan(
        grid=(Extent((("count", 128),)), Extent(), Extent()),
        cluster=(2, 1, 1),
        shared=(SharedBuffer("tile", 100_000),),
        programmatic_launch=True,
        roles=(Role("load", 1), Role("rest", 7)),
    )
    content_hash = launch.register(stub_binary(plan))
    launch.native().load("stub", content_hash, 0)
    assert "cuFuncSetAttribute 8 100000" in stub.log()
    buffer = np.zeros(3, np.float32)
    launch.native().launch("stub", content_hash, 0, [], [buffer.ctypes.data], [3, 4, 1, 1], [0.5], stream=77)
    (line,) = stub.launches()
    cluster_of_two = 2 | 1 << 32
    assert f"grid=4,1,1 block=256 shared=100000 stream=0x4d attribute=4:{cluster_of_two} attribute=6:1" in line
    assert line.endswith(struct.pack("<q", buffer.ctypes.data).hex() + " 03000000 " + struct.pack("<f", 0.5).hex())


@pytest.mark.parametrize(
    ("function", "result", "words"),
    [
        ("cuLibraryLoadData", 200, ["CUDA_ERROR_INVALID_IMAGE", "device kernel image is invalid"]),
        ("cuLibraryGetKernel", 500, ["finding entry fill", "driver error 500"]),
        ("cuKernelGetFunction", 1, ["CUDA_ERROR_INVALID_VALUE"]),
    ],
)
def test_failing_load_names_kernel_device_and_error(stub: Stub, function: str, result: int, words: list[str]) -> None:
    plan = fill_plan()
    content_hash = launch.register(stub_binary(plan))
    stub.fail(function, result)
    with pytest.raises(RuntimeError) as caught:
        launch.native().load("stub", content_hash, 1)
    for word in [plan.key, "device 1 (Stub 1, compute capability 9.0, driver 'stub')", *words]:
        assert word in str(caught.value)
    launch.native().load("stub", content_hash, 1)  # a failure is not kept: the next try may succeed


def test_failing_launch_names_kernel_device_and_error(stub: Stub) -> None:
    plan = fill_plan()
    content_hash = launch.register(stub_binary(plan))
    launch.native().load("stub", content_hash, 0)
    stub.fail("cuLaunchKernelEx", 719)
    with pytest.raises(RuntimeError, match=f"{plan.key}.*Stub 0.*grid 1 x 1 x 1.*CUDA_ERROR_LAUNCH_FAILED"):
        run(content_hash, np.zeros(4, np.float32))


@pytest.mark.parametrize(
    ("architecture", "capability", "runs"),
    [
        ("sm_90a", (9, 0), True),
        ("sm_90a", (8, 0), False),
        ("sm_90a", (10, 0), False),
        ("sm_100f", (10, 0), True),
        ("sm_100f", (10, 3), True),
        ("sm_100f", (10, 1), False),
        ("sm_100f", (12, 0), False),
        ("sm_100f", (9, 0), False),
    ],
)
def test_architecture_is_checked(stub: Stub, architecture: str, capability: tuple[int, int], runs: bool) -> None:
    stub.reset(*capability)
    plan = fill_plan(architecture)
    content_hash = launch.register(stub_binary(plan))
    if runs:
        launch.native().load("stub", content_hash, 0)
        return
    with pytest.raises(RuntimeError) as caught:
        launch.native().load("stub", content_hash, 0)
    for word in (plan.key, architecture, "Stub 0", "sm_90a, sm_100f", f"{capability[0]}.{capability[1]}"):
        assert word in str(caught.value)
    assert stub.count("cuLibraryLoadData") == 0


def test_parameters_of_the_loaded_code_are_compared(stub: Stub) -> None:
    content_hash = launch.register(stub_binary(fill_plan(), image=b"STUB entry=fill params=8,4,8"))
    with pytest.raises(RuntimeError, match="parameter 2 is 8 bytes in the loaded code, 4 in the recipe"):
        launch.native().load("stub", content_hash, 0)
    assert stub.count("cuLibraryUnload") == 1


def test_missing_libraries_and_functions(stub: Stub) -> None:
    content_hash = launch.register(stub_binary(fill_plan()))
    incomplete = stub.path.with_name("libstub_driver_incomplete.so")
    launch.declare_driver("too-old", str(incomplete), takes_ptx=False)
    with pytest.raises(RuntimeError, match=r"no function cuLaunchKernelEx.*CUDA 12.0"):
        launch.native().load("too-old", content_hash, 0)
    launch.declare_driver("absent", "/no/such/libcuda.so.1", takes_ptx=False)
    with pytest.raises(RuntimeError, match=r"/no/such/libcuda.so.1"):
        launch.native().load("absent", content_hash, 0)
    with pytest.raises(RuntimeError, match=r"No driver is called 'unheard-of'; there are: .*stub"):
        launch.native().load("unheard-of", content_hash, 0)
    launch.native().load("stub", content_hash, 0)
    with pytest.raises(RuntimeError, match="another name"):
        launch.declare_driver("stub", "/elsewhere.so", takes_ptx=False)


def test_eight_threads_first_use(stub: Stub) -> None:
    hashes = [launch.register(stub_binary(fill_plan())) for _ in range(5)]
    barrier = threading.Barrier(8)
    buffers = np.zeros((8, 5, 64), np.float32)

    def work(thread: int) -> None:
        barrier.wait()
        for index, content_hash in enumerate(hashes):
            launch.native().load("stub", content_hash, thread % 2)
            run(content_hash, buffers[thread, index], float(thread + 1), thread % 2)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert stub.count("cuLibraryLoadData") == 10
    assert (buffers == np.arange(1, 9, dtype=np.float32)[:, None, None]).all()


@pytest.mark.filterwarnings("ignore:os.fork:RuntimeWarning")  # the child calls the runtime alone, nothing of JAX
def test_child_after_fork_loads_again(stub: Stub) -> None:
    content_hash = launch.register(stub_binary(fill_plan()))
    launch.native().load("stub", content_hash, 0)
    child = os.fork()
    if child == 0:  # no test code may run on in the child
        signal.alarm(60)  # a child that hangs ends, and fails the test
        buffer = np.zeros(8, np.float32)
        try:
            launch.native().load("stub", content_hash, 0)
            run(content_hash, buffer, 3.0)
        finally:
            os._exit(0 if (buffer == 3).all() and stub.count("cuLibraryLoadData") == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_parameter_block_bytes() -> None:
    parameters = (
        Parameter("int32", "count"),
        Parameter("result", "filled"),
        Parameter("divisor", "count"),
        Parameter("float32", "value"),
        Parameter("int64", "count"),
    )
    plan = fill_plan(parameters=parameters)
    recipe = launch.native_recipe(plan, stub_binary(plan).layout)
    block = launch.native().parameter_block(recipe, [], [0x1122334455667788], [7, 1, 1, 1], [1.5])
    # 7: l = 3, multiplier = floor(2^32 * (8 - 7) / 7) + 1, shifts 1 and 2
    expected = struct.pack("<i4xQ", 7, 0x1122334455667788) + struct.pack("<IIBB2x", 7, 2**32 // 7 + 1, 1, 2)
    assert block == expected + struct.pack("<fq", 1.5, 7)


@pytest.mark.parametrize(("divisor", "words"), [(1, (1, 1, 0, 0)), (8, (8, 1, 1, 2)), (3, (3, 2**32 // 3 + 1, 1, 1))])
def test_divisor_words(divisor: int, words: tuple[int, ...]) -> None:
    assert launch.native().divisor(divisor) == words


@pytest.mark.parametrize("sanitizer", ["address", "thread"])
def test_runtime_under_sanitizers(sanitizer: str) -> None:
    folder = build_programs(sanitizer)
    program = [str(folder / "runtime_test"), str(folder / "libstub_driver.so")]
    done = subprocess.run(program, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
