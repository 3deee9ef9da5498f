// A CUDA driver without a GPU: libcuda.so.1 for tests, with what the engine calls of it and the
// rules that a real one enforces. It has two devices, whose memory the processor cannot touch.
//
//   an address of device memory faults where the processor touches it  the CUDA programming guide
//   work on two streams has no order but by events, words and the      CUDA driver API, "Stream
//     legacy stream                                                      synchronization behavior"
//   a call on a thread without a context is refused                    "Context management"
//   work on memory that is gone poisons the context (sticky error)     CUDA_ERROR_ILLEGAL_ADDRESS
//   freed memory reads as something else, and its address comes again  cuMemFree
//   an event waits for what it was recorded for when it was waited for cuStreamWaitEvent
//   pageable memory is read at once, and written before the call       "API synchronization
//   behavior"
//     returns
//   copies of a batch have no order among them                         cuMemcpyBatchAsync
//   a legacy handle is of cuMemAlloc memory only, of all of it, and    cuIpcGetMemHandle,
//     not for the process that made it                                   cuIpcOpenMemHandle
//   memory of cuMemCreate has the handles that were asked for          cuMemExportToShareableHandle
//   a dmabuf is of whole pages; memory of cuMemCreate has to ask cuMemGetHandleForAddressRange,
//                                                                        CUmemAllocationProp
//
// The calls are those of cuda.h, which it is built with; what has no body there is found by name
// below. Not there yet: capture, graphs, managed and pool memory, peers.
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

// Allocations and mappings that there are.
size_t cuda_double_live(void);

// How often a call has made its thread wait for a stream.
uint64_t cuda_double_waits(void);
}
