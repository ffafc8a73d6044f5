"""What a call asks of the driver: tensor maps and launches, in as few steps as possible.

The parameters of a call's kernels are laid out once, in a :class:`Block`. A steady-state call only
writes the addresses of its tensors there, which costs a twentieth of a microsecond each, where
packing all arguments anew costs more than the driver's own work.
"""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from cuda.bindings import driver

from convt3d.cuda import compiler
from convt3d.cuda.schedule import Launch, TensorMap

_MAP_BYTES = 128
_STORAGE_ALIGNMENT = 64  # of a CUtensorMap
_MAX_ENCODED = 64

launch_kernel = driver.cuLaunchKernelEx
_SUCCESS = driver.CUresult.CUDA_SUCCESS
_NO_CONTEXT = {
    driver.CUresult.CUDA_ERROR_INVALID_CONTEXT,
    driver.CUresult.CUDA_ERROR_INVALID_HANDLE,
}

_ELEMENTS = {
    name: getattr(driver.CUtensorMapDataType, f"CU_TENSOR_MAP_DATA_TYPE_{name.upper()}")
    for name in ("float32", "tfloat32", "float16", "bfloat16")
}
_SWIZZLES = {
    0: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_NONE,
    64: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_64B,
    128: driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B,
}


def load(launches: Sequence[Launch], device: int) -> list[Any]:
    """The function of each launch, compiled and loaded on a device whose context is current."""
    kernels = [(launch.kernel, launch.shared_bytes) for launch in launches]
    return [loaded.function for loaded in compiler.load(kernels, device)]


def bind_context(device: int) -> None:
    """Make PyTorch's context of a device current for the driver in this thread."""
    from cuda.core import Device

    Device(device).set_current()


def encode(described: TensorMap, address: int) -> bytes:
    """The 128 bytes of a tensor map over the memory at an address.

    Raises:
        RuntimeError: the driver refuses it.
    """
    status, encoded = driver.cuTensorMapEncodeTiled(
        _ELEMENTS[described.element],
        len(described.extents),
        address,
        [driver.cuuint64_t(n) for n in described.extents],
        [driver.cuuint64_t(n) for n in described.strides] or [driver.cuuint64_t(16)],
        [driver.cuuint32_t(n) for n in described.box],
        [driver.cuuint32_t(n) for n in described.steps],
        driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
        _SWIZZLES[described.swizzle],
        driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
        driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
    )
    if status != _SUCCESS:
        raise RuntimeError(f"{described} cannot be encoded for address {address:#x}: {status.name}")
    return ctypes.string_at(encoded.getPtr(), _MAP_BYTES)


class _Map:
    """A tensor map among the parameters: encoded again when its tensor's address changes."""

    __slots__ = ("_address", "_described", "_encoded", "_place", "_slot")

    def __init__(self, described: TensorMap, slot: int, place: memoryview) -> None:
        self._described, self._slot, self._place = described, slot, place
        self._address = 0
        self._encoded: dict[int, bytes] = {}

    def update(self, addresses: memoryview) -> None:
        address = addresses[self._slot]
        if address == self._address:
            return
        encoded = self._encoded.get(address)
        if encoded is None:
            if len(self._encoded) >= _MAX_ENCODED:
                self._encoded.clear()
            encoded = self._encoded[address] = encode(self._described, address)
        self._place[:] = encoded
        self._address = address


class Block:
    """The parameters of all launches of a call on one stream; one thread at a time uses it.

    ``addresses`` takes the tensors' addresses, at the positions that ``slots`` gives by name.
    """

    __slots__ = ("_device", "_label", "_launches", "_maps", "_storage", "addresses")

    def __init__(
        self,
        launches: Sequence[tuple[Launch, Any]],
        slots: Mapping[str, int],
        device: int,
        stream: int,
        label: str,
    ) -> None:
        """Lay out the parameters.

        Args:
            launches: each with its loaded function; all arguments are names of slots, tensor maps
                or numpy scalars.
            slots: positions of addresses by the name of a tensor or workspace.
            device: index of the CUDA device.
            stream: handle of the stream.
            label: what the launches do, for errors.
        """
        self._device, self._label = device, label
        storage = _Storage()
        names = storage.reserve(8 * len(slots))
        places = [
            [storage.place(a, slots, names) for a in launch.arguments] for launch, _ in launches
        ]
        base, view = storage.fix()
        self._storage = view
        self.addresses = view[names : names + 8 * len(slots)].cast("Q")
        self._maps = [
            _Map(argument, slots[argument.tensor], view[place : place + _MAP_BYTES])
            for (launch, _), offsets in zip(launches, places, strict=True)
            for argument, place in zip(launch.arguments, offsets, strict=True)
            if isinstance(argument, TensorMap)
        ]
        self._launches = []
        for (launch, function), offsets in zip(launches, places, strict=True):
            pointers = (ctypes.c_uint64 * len(offsets))(*(base + offset for offset in offsets))
            configuration = _configuration(launch, stream)
            self._launches.append((configuration, function, ctypes.addressof(pointers), pointers))

    def launch(self) -> None:
        """Launch all kernels on the tensors at ``addresses``.

        Raises:
            RuntimeError: the driver refuses a launch or a tensor map.
        """
        for described in self._maps:
            described.update(self.addresses)
        for configuration, function, pointers, _ in self._launches:
            status = launch_kernel(configuration, function, pointers, 0)[0]
            if status is not _SUCCESS:
                self._again(status, configuration, function, pointers)

    def _again(self, status: Any, configuration: Any, function: Any, pointers: int) -> None:
        """A thread that never touched the device has no context yet: autograd has such threads."""
        if status in _NO_CONTEXT:
            bind_context(self._device)
            (status,) = launch_kernel(configuration, function, pointers, 0)
        if status != _SUCCESS:
            raise RuntimeError(f"launching {self._label} failed: {status.name}")


class _Storage:
    """Plans the bytes of a block: parts are reserved first, then the memory is fixed."""

    def __init__(self) -> None:
        self._parts: list[tuple[int, bytes]] = []
        self._end = 0

    def reserve(self, size: int, alignment: int = 8) -> int:
        start = -(-self._end // alignment) * alignment
        self._end = start + size
        return start

    def place(self, argument: Any, slots: Mapping[str, int], names: int) -> int:
        """Where an argument's bytes lie."""
        if isinstance(argument, str):
            return names + 8 * slots[argument]
        if isinstance(argument, TensorMap):
            return self.reserve(_MAP_BYTES, _STORAGE_ALIGNMENT)
        if not isinstance(argument, np.generic):
            raise TypeError(f"{argument!r} cannot be a kernel argument")
        start = self.reserve(argument.itemsize, max(8, argument.itemsize))
        self._parts.append((start, argument.tobytes()))
        return start

    def fix(self) -> tuple[int, memoryview]:
        """The memory: its address and a view of its bytes."""
        buffer = (ctypes.c_ubyte * (self._end + _STORAGE_ALIGNMENT))()
        lead = -ctypes.addressof(buffer) % _STORAGE_ALIGNMENT
        view = memoryview(buffer).cast("B")[lead : lead + self._end]
        for start, value in self._parts:
            view[start : start + len(value)] = value
        return ctypes.addressof(buffer) + lead, view


def _configuration(launch: Launch, stream: int) -> Any:
    configuration = driver.CUlaunchConfig()
    configuration.gridDimX = launch.grid
    configuration.blockDimX = launch.block
    configuration.gridDimY = configuration.gridDimZ = 1
    configuration.blockDimY = configuration.blockDimZ = 1
    configuration.sharedMemBytes = launch.shared_bytes
    configuration.hStream = driver.CUstream(stream)
    if launch.dependent:
        attribute = driver.CUlaunchAttribute()
        attribute.id = (
            driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
        )
        attribute.value.programmaticStreamSerializationAllowed = 1
        configuration.attrs = [attribute]
        configuration.numAttrs = 1
    return configuration
