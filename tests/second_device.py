"""
A second device without its hardware: `torch.device("second")`, on which a wrong device fails as it does on a GPU. Its
tensors hold one of the CPU, which operations run on, and refuse those with tensors of the CPU that CUDA's refuse.
Random numbers are the CPU's: training gives what it gives on the CPU, up to rounding.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils.backend_registration import _DummyBackendModule, _setup_privateuseone_for_python_backend

NAME = "second"
aten = torch.ops.aten
INDEXING = {aten.index, aten.index_put, aten.index_put_, aten._index_put_impl_, aten._unsafe_index}


class SecondTensor(torch.Tensor):
    """A tensor on the second device. `on_cpu` has its values."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    on_cpu: torch.Tensor

    @staticmethod
    def __new__(cls, on_cpu: torch.Tensor) -> "SecondTensor":
        kept = {"strides": on_cpu.stride(), "storage_offset": on_cpu.storage_offset(), "dtype": on_cpu.dtype}
        tensor = torch.Tensor._make_wrapper_subclass(cls, on_cpu.size(), device=f"{NAME}:0", **kept)
        tensor.on_cpu = on_cpu
        return tensor

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, *args, **(kwargs or {}))

    def __repr__(self, **kwargs: Any) -> str:
        return f"SecondTensor({self.on_cpu})"

    def tolist(self) -> Any:
        return self.on_cpu.tolist()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.on_cpu.untyped_storage()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.on_cpu.__reduce_ex__(protocol)  # what is loaded is on the CPU until it is moved


def run(func: Any, *args: Any, **kwargs: Any) -> Any:
    """Run an operation on the CPU, for tensors of the second device or to make one."""
    if torch.Tag.inplace_view in func.tags:
        raise NotImplementedError(
            f"{func} on the second device: it changes sizes, and its tensors have copies of these"
        )
    check_devices(func, args, kwargs)
    given: dict[int, torch.Tensor] = {}

    def to_cpu(x: Any) -> Any:
        if isinstance(x, torch.device):
            return torch.device("cpu")
        if not isinstance(x, torch.Tensor):
            return x
        on_cpu = x.on_cpu if isinstance(x, SecondTensor) else x
        given[id(on_cpu)] = x
        return on_cpu

    def from_cpu(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        return given[id(x)] if id(x) in given else SecondTensor(x)  # what an operation in place returns was given

    result = func(*in_each(to_cpu, args), **in_each(to_cpu, kwargs))
    is_for_cpu = func is aten._to_copy.default and kwargs.get("device") == torch.device("cpu")
    return result if is_for_cpu else in_each(from_cpu, result)


def check_devices(func: Any, args: Any, kwargs: Any) -> None:
    """Raise where CUDA would: a tensor of the CPU is taken as a number that is read pointwise, or as indices."""
    operation = func.overloadpacket
    if operation in (aten.copy_, aten._to_copy):
        return
    takes_numbers = torch.Tag.pointwise in func.tags or operation in INDEXING
    written = args[0] if func._schema.is_mutable else None
    if operation in INDEXING:
        args = (args[0], *args[2:])

    def check(x: Any) -> None:
        if isinstance(x, torch.Generator) and x.device.type != NAME:
            raise RuntimeError(f"Expected a {NAME!r} device type for generator but found {x.device.type!r} ({func})")
        is_on_cpu = isinstance(x, torch.Tensor) and not isinstance(x, SecondTensor)
        if is_on_cpu and (x is written or x.dim() > 0 or not takes_numbers):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and "
                f"{x.device}! ({func}, a tensor of shape {tuple(x.shape)})"
            )

    in_each(check, (args, kwargs))


def in_each(function: Callable[[Any], Any], x: Any) -> Any:
    """Apply a function to all that lists, tuples and dictionaries hold. torch's own way takes most of a run's time."""
    if isinstance(x, list | tuple):
        return type(x)([in_each(function, y) for y in x])
    if isinstance(x, dict):
        return {key: in_each(function, y) for key, y in x.items()}
    return function(x)


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What `torch.tensor(..., device="second")` copies by, beneath Python's dispatch."""
    target.on_cpu.copy_(source)
    return target


class Module(_DummyBackendModule):
    """`torch.second`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]

    # Random numbers are drawn on the CPU

    def get_rng_state(self, device: Any = None) -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(self, state: torch.Tensor, device: Any = None) -> None:
        torch.set_rng_state(state)


LIBRARIES = [torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")]  # for as long as they are held


def register() -> None:
    """Add the device to this process, for good."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    everything, of_aten = LIBRARIES
    everything.fallback(run, "PrivateUse1")
    of_aten.impl("_copy_from", copy_from, "PrivateUse1")
