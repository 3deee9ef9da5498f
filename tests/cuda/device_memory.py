"""A GPU's memory as its driver sees it; for processes that run_on_driver() has started."""

from __future__ import annotations

import ctypes
from typing import Any

from cuda.bindings import driver

from tests.cuda.bindings import good


def allocate(nbytes: int) -> int:
    return int(good(driver.cuMemAlloc(nbytes)))


def free(address: int) -> None:
    good(driver.cuMemFree(address))


def create(nbytes: int) -> int:
    """Returns memory of cuMemCreate on GPU 0 that other processes may map. It is never freed."""
    address = int(good(driver.cuMemAddressReserve(nbytes, 0, 0, 0)))
    bring(address, nbytes)
    return address


def bring(address: int, nbytes: int) -> None:
    """Maps such memory at a reserved address."""
    location = driver.CUmemLocation()
    location.type = driver.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
    location.id = 0
    wanted = driver.CUmemAllocationProp()
    wanted.type = driver.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
    wanted.location = location
    wanted.requestedHandleTypes = (
        driver.CUmemAllocationHandleType.CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
    )
    access = driver.CUmemAccessDesc()
    access.location = location
    access.flags = driver.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
    handle = good(driver.cuMemCreate(nbytes, wanted, 0))
    good(driver.cuMemMap(address, nbytes, 0, handle, 0))
    good(driver.cuMemSetAccess(address, nbytes, [access], 1))
    good(driver.cuMemRelease(handle))


def take_away(address: int, nbytes: int) -> None:
    """Unmaps the memory; the address stays reserved."""
    good(driver.cuMemUnmap(address, nbytes))


def write(address: int, data: bytes) -> None:
    good(driver.cuMemcpyHtoD(address, data, len(data)))


def read(address: int, nbytes: int) -> bytes:
    data = bytearray(nbytes)
    good(driver.cuMemcpyDtoH(data, address, nbytes))
    return bytes(data)


def is_known(address: int) -> bool:
    """True if the address is memory that CUDA knows."""
    kind = driver.CUpointer_attribute.CU_POINTER_ATTRIBUTE_MEMORY_TYPE
    error, _ = driver.cuPointerGetAttribute(kind, address)
    return bool(error == driver.CUresult.CUDA_SUCCESS)


def corrupt_peers() -> None:
    """Makes the double's kernels read wrong bytes from memory of another GPU from now on."""
    library: Any = ctypes.CDLL("libcuda.so.1")
    library.cuda_double_peers_corrupt(ctypes.c_bool(True))


def live() -> int | None:
    """Returns the allocations and mappings that the double counts; None with a real driver."""
    library: Any = ctypes.CDLL("libcuda.so.1")
    if not hasattr(library, "cuda_double_live"):
        return None
    library.cuda_double_live.restype = ctypes.c_size_t
    return int(library.cuda_double_live())
