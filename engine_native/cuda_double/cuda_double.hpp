// A CUDA driver without a GPU: libcuda.so.1 for tests, with the calls that the engine makes and the
// rules that a real driver enforces. It has two devices, whose memory the processor cannot touch:
//
// - Device memory faults if the processor touches it (CUDA programming guide).
// - A call on a thread without a context is refused ("Context Management").
// - Work on two streams is ordered only by events, words and the legacy stream ("Stream
//   synchronization behavior").
// - A wait for an event is for the last record of the event before the wait (cuStreamWaitEvent).
// - Work queued on a captured stream becomes a graph. An event does not cross the border of a
//   capture, a wait breaks the capture, and unsafe calls of other threads are forbidden meanwhile
//   (cuStreamBeginCapture, cuThreadExchangeStreamCaptureMode).
// - The nodes of a graph have the order of their edges and no other (cuGraphLaunch).
// - Pageable memory is read at once, and written before the call returns ("API synchronization
//   behavior"). Copies of a batch have no order among them (cuMemcpyBatchAsync).
// - Freed memory reads as other bytes, and its address is used again (cuMemFree). Work on freed
//   memory poisons the context (CUDA_ERROR_ILLEGAL_ADDRESS).
// - Memory of a pool exists from one point of a stream to another (cuMemAllocAsync).
// - A kernel reaches memory of another device only if that is possible and was enabled, and never
//   memory of a pool (cuCtxEnablePeerAccess, cuIpcOpenMemHandle, cuMemSetAccess). Behind an IOMMU
//   it may read wrong bytes there without an error (CUDA programming guide, "IOMMU on Linux").
// - A legacy handle stands for a whole allocation of cuMemAlloc, for other processes that see its
//   device (cuIpcGetMemHandle, cuIpcOpenMemHandle, CUDA_VISIBLE_DEVICES).
// - Memory of cuMemCreate has the handles that were requested (cuMemExportToShareableHandle).
// - A dmabuf consists of whole pages; memory of cuMemCreate has to request it, and managed or pool
//   memory has none (cuMemGetHandleForAddressRange, CUmemAllocationProp).
// - Memory of cuMemCreate takes no SYNC_MEMOPS (openucx/ucx#9895), nor does that of a pool.
// - A context has one lock. A call that allocates, frees, pins or unpins memory, loads or unloads a
//   module, or runs a kernel for the first time holds it until all streams of the context are idle;
//   all other calls into the context wait for it (CUDA programming guide, "Lazy Loading", "Implicit
//   Synchronization", CUDA_MODULE_LOADING; reports: meta-pytorch/torchcomms#2334 and #2470,
//   kvcache-ai/Mooncake#1755, microsoft/mscclpp#394).
// - Streams share hardware queues (CUDA_DEVICE_MAX_CONNECTIONS): work that has not begun, e.g. a
//   wait for a word, holds back work that was queued there later, also of other streams. Streams of
//   the highest priority share theirs only with each other (CUDA programming guide, "Environment
//   Variables", cuStreamCreateWithPriority; microsoft/mscclpp#516).
// - A launch on a stream with 1,024 launches waits for room (CUDA programming guide, "Asynchronous
//   Execution": a full queue makes a launch synchronous; NVIDIA does not say how many it holds).
// - Memory that another process has open by its handle must not be freed: that poisons the context
//   here (cudaIpcGetMemHandle: the behaviour is undefined).
// - A context may have the handle of the one before it, which was reset (cuDevicePrimaryCtxReset).
// - A fatal fault of one MPS client ends the others' contexts on that GPU (MPS documentation,
//   "Memory Protection and Error Containment").
// - CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM and CAN_USE_64_BIT_STREAM_MEM_OPS may be 0
//   (cuMemHostRegister, cuStreamWaitValue64).
//
// The double is stricter than a driver: all its allocations wait for streams, pageable memory and
// memory of a pool are never captured, a capture that forbids querying an event forbids querying a
// stream, too, and cuMemFree needs a context (driver 580 finds it by the address).
//
// The calls are those of cuda.h, with which it is built; the double's additions are below.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

extern "C" {

// A function that stands for a kernel, and runs in the order of the stream. It reaches device
// memory only by cuda_double_alias(), and returns false if it got none: an illegal address.
using cuda_double_kernel = bool (*)(void* arguments);
CUresult cuda_double_launch(CUstream stream, cuda_double_kernel kernel, void* arguments);

// Returns where device memory really is; null if it is not there, or not in one piece.
void* cuda_double_alias(CUdeviceptr address, size_t size);

// Sets a function that cuFlushGPUDirectRDMAWrites() calls: a NIC's writes may wait before the
// device's memory until then. Stricter than a device, which orders them at some time.
void cuda_double_on_flush(void (*flush)(void));

// Sets whether the devices reach each other; by default they do.
void cuda_double_peers(bool reach);

// Sets whether a module's kernels read wrong bytes from another device's memory, without an error;
// by default they do not.
void cuda_double_peers_corrupt(bool corrupt);

// Returns the number of allocations, mappings and retained contexts.
size_t cuda_double_live(void);

// Returns the number of threads that hold the lock of a context, or are about to.
size_t cuda_double_holding(void);

// Sets what cuDeviceGetAttribute() returns for all devices from now on; a value below 0 restores
// the default.
void cuda_double_attribute(CUdevice_attribute attribute, int value);

// Sets whether a device that is reset gets the handle of its last context again; by default it does
// not.
void cuda_double_same_handles(bool same);

// Acts as if another client of the MPS server had a fatal fault on the device.
void cuda_double_mps_fault(CUdevice device);

// Returns how often a call has made its thread wait for a stream.
uint64_t cuda_double_waits(void);

// Returns how often a thread named as an engine's has made a call that may wait for a stream or for
// the lock of a context.
uint64_t cuda_double_by_engines(void);
}
