// A CUDA driver without a GPU: libcuda.so.1 for tests, with what the engine calls of it and the
// rules that a real one enforces. It has two devices, whose memory the processor cannot touch:
//
// - Device memory faults where the processor touches it (CUDA programming guide).
// - A call on a thread without a context is refused ("Context Management").
// - Work on two streams has no order but by events, words and the legacy stream ("Stream
//   synchronization behavior").
// - An event stands for what it was recorded for when it was waited for (cuStreamWaitEvent).
// - What is queued on a captured stream becomes a graph. An event does not cross the border of a
//   capture, a wait breaks it, and meanwhile other threads are forbidden unsafe calls
//   (cuStreamBeginCapture, cuThreadExchangeStreamCaptureMode).
// - The nodes of a graph have the order of their edges and no other (cuGraphLaunch).
// - Pageable memory is read at once, and written before the call returns ("API synchronization
//   behavior"). Copies of a batch have no order among them (cuMemcpyBatchAsync).
// - Freed memory reads as something else, and its address comes again (cuMemFree). Work on memory
//   that is gone poisons the context (CUDA_ERROR_ILLEGAL_ADDRESS).
// - Memory of a pool exists from one point of a stream to another (cuMemAllocAsync).
// - A kernel reaches memory of another device where that was enabled and is possible, and was got
//   by cuMemAlloc (cuCtxEnablePeerAccess, cuIpcOpenMemHandle, cuMemSetAccess). Behind an IOMMU it
//   may read wrong bytes there without an error (CUDA programming guide, "IOMMU on Linux").
// - A legacy handle is for cuMemAlloc memory only, all of it, and other processes that see its
//   device (cuIpcGetMemHandle, cuIpcOpenMemHandle, CUDA_VISIBLE_DEVICES).
// - Memory of cuMemCreate has the handles that were asked for (cuMemExportToShareableHandle).
// - A dmabuf is of whole pages; memory of cuMemCreate has to ask for it, and managed or pool memory
//   has none (cuMemGetHandleForAddressRange, CUmemAllocationProp).
// - Memory of cuMemCreate takes no SYNC_MEMOPS (openucx/ucx#9895), nor does that of a pool.
// - A context has one lock. Who allocates, frees, pins or unpins memory, loads or unloads a module,
//   or runs a kernel for the first time holds it until all streams of the context are idle; all
//   other calls into the context wait for it (CUDA programming guide, "Lazy Loading", "Implicit
//   Synchronization", CUDA_MODULE_LOADING; reports: meta-pytorch/torchcomms#2334 and #2470,
//   kvcache-ai/Mooncake#1755, microsoft/mscclpp#394).
// - Streams share hardware queues (CUDA_DEVICE_MAX_CONNECTIONS): what has not begun, as a wait for
//   a word, keeps back what was queued there later, of other streams, too. Streams of the highest
//   priority share theirs only with each other (CUDA programming guide, "Environment Variables",
//   cuStreamCreateWithPriority; microsoft/mscclpp#516).
// - A launch on a stream with 1,024 waits for room (CUDA programming guide, "Asynchronous
//   Execution": a full queue makes a launch synchronous; NVIDIA does not say how many it holds).
// - Memory that another process has open by its handle must not be freed: that poisons the context
//   here (cudaIpcGetMemHandle: the behaviour is undefined).
// - A context that was reset may have the handle of the next one (cuDevicePrimaryCtxReset).
// - A fatal fault of one MPS client ends the others' contexts on that GPU (MPS documentation,
//   "Memory Protection and Error Containment").
// - CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM and CAN_USE_64_BIT_STREAM_MEM_OPS may be 0
//   (cuMemHostRegister, cuStreamWaitValue64).
//
// Stricter than a driver: not each allocation of a driver's waits for streams, pageable memory and
// memory of a pool are never captured, a capture that forbids to ask an event forbids to ask a
// stream, too, and cuMemFree needs a context (driver 580 finds it by the address).
//
// The calls are those of cuda.h, which it is built with; what cuda.h does not have is below.
#pragma once

#include <cuda.h>

#include <cstddef>
#include <cstdint>

extern "C" {

// Stands for a kernel: runs in the order of the stream. It reaches device memory by
// cuda_double_alias() alone, and returns false where it got none: an illegal address.
using cuda_double_kernel = bool (*)(void* arguments);
CUresult cuda_double_launch(CUstream stream, cuda_double_kernel kernel, void* arguments);

// Where device memory really is; null where it is not, or not in one piece.
void* cuda_double_alias(CUdeviceptr address, size_t size);

// Called by cuFlushGPUDirectRDMAWrites(): a NIC's writes may lie before the device's memory until
// then. Stricter than a device, which orders them some time.
void cuda_double_on_flush(void (*flush)(void));

// Whether the devices reach each other; they do until told otherwise.
void cuda_double_peers(bool reach);

// Whether a module's kernels read wrong bytes from another device's memory, without an error; they
// do not until told otherwise.
void cuda_double_peers_corrupt(bool corrupt);

// Allocations, mappings and retained contexts that there are.
size_t cuda_double_live(void);

// How many threads hold the lock of a context, or are about to.
size_t cuda_double_holding(void);

// What cuDeviceGetAttribute() says of all devices from now on; below 0: what it says else.
void cuda_double_attribute(CUdevice_attribute attribute, int value);

// Whether a device that is reset gets the handle of its last context again; it does not until told
// otherwise.
void cuda_double_same_handles(bool same);

// As where another client of the MPS server had a fatal fault on the device.
void cuda_double_mps_fault(CUdevice device);

// How often a call has made its thread wait for a stream.
uint64_t cuda_double_waits(void);

// How often a thread named as an engine's has made a call that may wait for a stream or for the
// lock of a context.
uint64_t cuda_double_by_engines(void);
}
