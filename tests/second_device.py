"""
A second device without its hardware: `torch.device("second")`, on which a wrong device fails as it does on a GPU.

Its tensors hold a tensor on the CPU, which every operation runs on, and refuse operations together with tensors of the
CPU where CUDA's do. Random numbers are the CPU's, so that training gives what it gives on the CPU, bit for bit.
"""

from typing import Any

import torch
from torch.utils._pytree import tree_map
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
        tensor = torch.Tensor._make_wrapper_subclass(
            cls,
            on_cpu.size(),
            strides=on_cpu.stride(),
            storage_offset=on_cpu.storage_offset(),
            dtype=on_cpu.dtype,
            device=f"{NAME}:0",
        )
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
    """Run an operation on the CPU for tensors of the second device, or to make one."""
    if torch.Tag.inplace_view in func.tags:
        raise NotImplementedError(f"{func} on the second device: it would change sizes that it has a copy of")
    check_devices(func, args, kwargs)
    given: dict[int, torch.Tensor] = {}

    def to_cpu(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            on_cpu = x.on_cpu if isinstance(x, SecondTensor) else x
            given[id(on_cpu)] = x
            return on_cpu
        return torch.device("cpu") if isinstance(x, torch.device) else x

    result = func(*tree_map(to_cpu, args), **tree_map(to_cpu, kwargs))
    if func is aten._to_copy.default and torch.device(kwargs.get("device") or NAME).type == "cpu":
        return result
    return tree_map(
        lambda x: (given.get(id(x)) if id(x) in given else SecondTensor(x)) if isinstance(x, torch.Tensor) else x,
        result,
    )


def check_devices(func: Any, args: Any, kwargs: Any) -> None:
    """Raise where CUDA would: only pointwise operations take a tensor of the CPU, and only a number that they read."""
    operation = func.overloadpacket
    if operation in (aten.copy_, aten._to_copy):
        return
    if operation in INDEXING:
        args = (args[0], *args[2:])  # indices may be on the CPU, for tensors on the device
    written = [args[0]] if func._schema.is_mutable else []
    for x in torch.utils._pytree.tree_leaves((args, kwargs)):
        if isinstance(x, torch.Generator) and x.device.type != NAME:
            raise RuntimeError(f"Expected a {NAME!r} device type for generator but found {x.device.type!r} ({func})")
        if not isinstance(x, torch.Tensor) or isinstance(x, SecondTensor):
            continue
        may_read = x.dim() == 0 and (torch.Tag.pointwise in func.tags or operation in INDEXING)
        if not may_read or any(x is y for y in written):
            raise RuntimeError(
                f"Expected all tensors to be on the same device, but found at least two devices, {NAME}:0 and "
                f"{x.device}! ({func}, a tensor of shape {tuple(x.shape)})"
            )


def copy_from(source: torch.Tensor, target: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
    """What `torch.tensor(..., device="second")` copies by, beneath Python's dispatch."""
    target.on_cpu.copy_(source)
    return target


class Module(_DummyBackendModule):
    """`torch.second`."""

    def get_amp_supported_dtype(self) -> list[torch.dtype]:
        return [torch.bfloat16]


LIBRARIES = [torch.library.Library("_", "IMPL"), torch.library.Library("aten", "IMPL")]  # for as long as they are held


def register() -> None:
    """Add the device to this process, for good."""
    _setup_privateuseone_for_python_backend(NAME, backend_module=Module())
    everything, of_aten = LIBRARIES
    everything.fallback(run, "PrivateUse1")
    of_aten.impl("_copy_from", copy_from, "PrivateUse1")
