"""Kernels as CuTeDSL compiles them: the host function runs for real, and its launches are caught instead of reaching
a GPU.
"""

from __future__ import annotations

import ctypes
import re
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from cutlass import cute
from cutlass._mlir.execution_engine import ExecutionEngine

from tests.ptx.errors import PtxError
from tests.ptx.launch import Launch
from tests.ptx.parser import parse
from tests.ptx.program import Program

_POINTER, _INT = ctypes.c_void_p, ctypes.c_int32
_COOPERATIVE, _CLUSTER, _OVERLAP = 2, 4, 6  # cudaLaunchAttributeID


class _Attribute(ctypes.Structure):
    _fields_ = (("id", _INT), ("pad", _INT), ("value", ctypes.c_uint32 * 16))


class _Config(ctypes.Structure):
    """cudaLaunchConfig_t"""

    _fields_ = (
        ("grid", ctypes.c_uint32 * 3), ("block", ctypes.c_uint32 * 3), ("dynamic_shared", ctypes.c_uint64),
        ("stream", _POINTER), ("attributes", ctypes.POINTER(_Attribute)), ("attribute_count", ctypes.c_uint32),
    )  # fmt: skip


class _Runtime:
    """What the host code calls instead of CUDA. It knows nothing of the engine, whose C++ side holds it: a ring through
    there would never be collected.
    """

    def __init__(self, programs: dict[str, Program]) -> None:
        self.programs = programs
        self.launches: list[Launch] = []
        self.gpu = 0
        self._names: list[str] = []
        self._callbacks: list[Any] = []

    def register(self, engine: ExecutionEngine, module: str) -> None:
        """Own versions of every CUDA entry point that `module` declares: launches are recorded, the rest succeed at
        once.
        """
        special: dict[str, Callable[..., int]] = {
            "_cudaLaunchKernelEx": self._on_launch,
            "_cudaLibraryGetKernel": self._on_get_kernel,
        }
        for name, signature in re.findall(r"llvm\.func @(_?cu\w+)\(([^)]*)\) -> i32\n", module):
            kinds = [
                _POINTER if "ptr" in s else ctypes.c_int64 if "i64" in s else _INT
                for s in signature.split(",")
                if s.strip()
            ]
            callback = ctypes.CFUNCTYPE(_INT, *kinds)(special.get(name, _succeed))
            self._callbacks.append(callback)
            engine.raw_register_runtime(name, ctypes.cast(callback, _POINTER))

    def _on_get_kernel(self, out: int, library: int, name: int) -> int:
        self._names.append(ctypes.string_at(name).decode())
        ctypes.cast(out, ctypes.POINTER(_POINTER))[0] = len(self._names)
        return 0

    def _on_launch(self, config_pointer: int, kernel: int, arguments: int) -> int:
        config = ctypes.cast(config_pointer, ctypes.POINTER(_Config)).contents
        attributes = {a.id: list(a.value) for a in (config.attributes[i] for i in range(config.attribute_count))}
        program = self.programs[self._names[kernel - 1]]
        self.launches.append(
            Launch(
                program, _dim3(config.grid), _dim3(config.block), _parameters(program, arguments), self.gpu,
                config.dynamic_shared,
                _dim3(attributes.get(_CLUSTER, [1, 1, 1])),
                overlaps=bool(attributes.get(_OVERLAP, [0])[0]), cooperative=bool(attributes.get(_COOPERATIVE, [0])[0]),
            )
        )  # fmt: skip
        return 0


class Compiled:
    """A compiled @cute.jit function. Calling it with CPU tensors and scalars gives the launches its host code makes."""

    def __init__(self, compiled: Any) -> None:
        """`compiled` is what cute.compile(..., options="--keep-ptx") returned."""
        self._compiled = compiled
        self.ptx: str = compiled.artifacts.PTX
        module = parse(self.ptx)
        self.programs = {name: Program(module, kernel) for name, kernel in module.kernels.items()}
        self._engine = ExecutionEngine(compiled.ir_module, opt_level=0)
        self._runtime = _Runtime(self.programs)
        self._runtime.register(self._engine, str(compiled.ir_module))
        self._changed: dict[tuple[str, str], Program] = {}
        self._load()

    def __call__(self, *arguments: Any, gpu: int = 0) -> list[Launch]:
        """The launches of one host call, for GPU `gpu`. torch tensors are passed as CuTe tensors; a stream argument
        may be left to None.
        """
        self._runtime.launches, self._runtime.gpu = [], gpu
        prepared = [self._argument(a) for a in arguments]
        pointers, keep = self._compiled.execution_args.generate_execution_args(tuple(prepared), {})
        result = ctypes.c_int32(0)
        packed = (_POINTER * (len(pointers) + 1))()
        for i, pointer in enumerate(pointers):
            packed[i] = pointer if isinstance(pointer, int) else ctypes.cast(pointer, _POINTER).value
        packed[len(pointers)] = ctypes.cast(ctypes.pointer(result), _POINTER).value
        self._function("_mlir_ciface_" + self._compiled.function_name)(packed)
        del keep
        if result.value:
            raise PtxError(f"the host function returned CUDA error {result.value}")
        return self._runtime.launches

    def changed(self, old: str, new: str) -> Program:
        """The module's one kernel with `new` wherever its PTX has `old`."""
        if (old, new) not in self._changed:
            assert old in self.ptx
            module = parse(self.ptx.replace(old, new))
            (kernel,) = module.kernels.values()
            self._changed[old, new] = Program(module, kernel)
        return self._changed[old, new]

    def _argument(self, argument: Any) -> Any:
        return as_cute_tensor(argument) if isinstance(argument, torch.Tensor) else argument

    def _function(self, name: str) -> Callable[..., Any]:
        return ctypes.CFUNCTYPE(_INT, _POINTER)(self._engine.raw_lookup(name))

    def _load(self) -> None:
        library = ctypes.c_void_p()
        holder = ctypes.pointer(ctypes.pointer(library))
        error, device = ctypes.pointer(_INT(0)), ctypes.pointer(_INT(0))
        for name, arguments in (("cuda_init", (holder, error)), ("cuda_load_to_device", (holder, device, error))):
            packed = (_POINTER * len(arguments))(*(ctypes.cast(a, _POINTER) for a in arguments))
            self._function(name)(packed)


def _succeed(*_: Any) -> int:
    return 0


def _dim3(values: Any) -> tuple[int, int, int]:
    return int(values[0]), int(values[1]), int(values[2])


def _parameters(program: Program, arguments: int) -> bytes:
    pointers = ctypes.cast(arguments, ctypes.POINTER(_POINTER))
    block = bytearray(program.param_size)
    for i, parameter in enumerate(program.kernel.params):
        offset = program.param_offsets[parameter.name]
        address = pointers[i]
        assert address is not None
        block[offset : offset + parameter.size] = ctypes.string_at(address, parameter.size)
    return bytes(block)


def as_cute_tensor(tensor: torch.Tensor) -> Any:
    """A torch tensor as a CuTe runtime tensor with dynamic shape and strides."""
    return cute.runtime.from_dlpack(tensor, assumed_align=16, enable_tvm_ffi=False).mark_layout_dynamic()


def compile_kernel(function: Any, *arguments: Any, arch: str = "sm_90a", linked: bool = True) -> Compiled:
    """Compiles a @cute.jit function with (fake) arguments for `arch`: "sm_90a" or "sm_100a". Without `linked` it may
    call functions that are in no library.
    """
    more = "" if linked else "--ptxas-options '-c'"
    with tempfile.TemporaryDirectory(prefix="ptx-") as folder:
        options = f"--gpu-arch {arch} --keep-ptx --dump-dir {folder} {more}"
        return Compiled(cute.compile(function, *arguments, options=options))
