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
//
// Stricter than a driver: pageable memory and memory of a pool are never captured, a capture that
// forbids to ask an event forbids to ask a stream, too, and cuMemFree needs a context (driver 580
// finds it by the address).
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

// Allocations and mappings that there are.
size_t cuda_double_live(void);

// How often a call has made its thread wait for a stream.
uint64_t cuda_double_waits(void);
}
