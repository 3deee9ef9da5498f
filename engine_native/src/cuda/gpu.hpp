// A GPU as one engine uses it: its primary context, the engine's stream, kernels, pinned memory.
//
// The driver holds up every call into a context while any thread of the process allocates, frees or
// loads a kernel there, which in turn waits for all streams. So the engine thread makes no such
// call: it hands launches, flushes and questions to a thread of the GPU, and reads words that
// kernels write.
#pragma once

#include <array>
#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "cuda/driver.hpp"
#include "cuda/gpu_thread.hpp"
#include "cuda/kernels.hpp"
#include "cuda/staging.hpp"
#include "cuda/stream_order.hpp"
#include "fd.hpp"
#include "kvxfer/error.hpp"
#include "thread_owner.hpp"

namespace kvxfer {
class MemoryRegion;
}

namespace kvxfer::cuda {

// Makes a context current on the calling thread while it lives. It also relaxes the thread's
// capture mode: otherwise a capture by another thread would forbid queries of events (cuda.h).
class Current {
 public:
  Current(const Driver& driver, Context context) : driver_(driver) {
    pushed_ = driver.ctx_push_current(context);
    driver.thread_exchange_stream_capture_mode(&mode_);
  }
  ~Current() {
    driver_.thread_exchange_stream_capture_mode(&mode_);
    if (pushed_ == kSuccess) driver_.ctx_pop_current(nullptr);
  }
  Current(const Current&) = delete;
  Current& operator=(const Current&) = delete;

  // Fails once the context is destroyed: then another one is current.
  Status status() const { return pushed_; }

 private:
  const Driver& driver_;
  int mode_ = kRelaxed;
  Status pushed_;
};

// Adjacent allocations of cuMemCreate, as files that another process maps.
struct FileParts {
  static constexpr std::size_t kMost = 64;  // a process may have few descriptors
  struct Part {
    UniqueFd file;
    std::uint64_t size;
  };
  std::vector<Part> parts;
  std::uint64_t offset = 0;  // start of the exported bytes in the first part
};

// Memory of a GPU of this host, opened by a handle or files of another process. The destructor
// closes it, which may take long.
class ImportedMemory {
 public:
  // `mapped`: the bytes mapped from files; 0: opened by a handle.
  ImportedMemory(std::shared_ptr<Gpu> gpu, Address base, std::size_t mapped)
      : gpu_(std::move(gpu)), base_(base), mapped_(mapped) {}
  ~ImportedMemory();
  ImportedMemory(const ImportedMemory&) = delete;
  ImportedMemory& operator=(const ImportedMemory&) = delete;

  Address base() const { return base_; }
  // True if it contains `bytes` from `offset` on.
  bool holds(std::uint64_t offset, std::uint64_t bytes) const;

 private:
  std::shared_ptr<Gpu> gpu_;
  Address base_;
  std::size_t mapped_;
};

class Gpu final : public std::enable_shared_from_this<Gpu> {
 public:
  // The maximum number of copies of one launch.
  static constexpr std::size_t kMaxCopies = 16384;
  // Words that streams count up, and as many that streams wait for.
  static constexpr std::size_t kWords = 1024;

  // Opens the GPU; `device` is CUDA's number in this process. Ending a GPU waits for all streams,
  // so one that is not used any more, and has not failed, is kept for the next open().
  static Result<std::shared_ptr<Gpu>> open(const std::shared_ptr<const Driver>& driver, int device);
  // Ends the kept GPUs, once all memory that was dropped is free.
  static void end_unused();
  Gpu(const Gpu&) = delete;
  Gpu& operator=(const Gpu&) = delete;

  // --- any thread
  int device() const { return device_; }
  // "GPU 0 (NVIDIA H200)"
  const std::string& label() const { return label_; }
  // The same in every process.
  const Uuid& uuid() const { return uuid_; }
  // Allocates zeroed memory.
  Result<Address> allocate(std::size_t bytes);
  // Frees the memory soon, on another thread.
  void free(Address address);
  // Returns once memory that was dropped before is free: a free that runs while a stream waits for
  // a copy would keep the copy from being launched. Not on the engine thread.
  void await_frees() const;
  // Copy between the GPU and host memory, and wait for the copy.
  Result<void> read(Address from, std::span<std::byte> into) const;
  Result<void> write(Address to, std::span<const std::byte> from) const;
  // Returns the handle of the whole allocation that holds the address; no value if CUDA has none.
  std::optional<IpcHandle> handle_of(Address address) const;
  // Returns the memory as files. Fails if it is not of cuMemCreate, or did not ask for files.
  Result<FileParts> files_of(Address address, std::size_t bytes) const;
  // Allocates memory that holds these bytes, for as long as its file is open or mapped.
  Result<FileParts> file_with(std::span<const std::byte> bytes);
  // Import memory of this GPU, or of another that CUDA lets this one reach.
  Result<std::unique_ptr<ImportedMemory>> import(const IpcHandle& handle);
  Result<std::unique_ptr<ImportedMemory>> import(const FileParts& files);
  void close_imported(Address base, std::size_t mapped) const;
  // Reads with the kernel that copies pages, which may take another route to memory of another GPU
  // than CUDA's copies. Waits for it.
  Result<std::vector<std::byte>> read_by_kernel(Address from, std::uint32_t bytes) const;
  // The allocation, or the mapping of cuMemMap, that holds the address.
  struct Range {
    Address start;
    std::size_t size;
  };
  std::optional<Range> range_of(Address address) const;
  // True if the memory belongs to another context than the engine's.
  bool foreign(Context context) const { return context && context != context_; }

  // --- any thread: memory that NICs reach themselves (GPUDirect)
  // A file that stands for whole pages; the memory begins at `offset` of it.
  struct Dmabuf {
    UniqueFd fd;
    std::uint64_t offset;
  };
  Result<Dmabuf> dmabuf(Address address, std::size_t bytes) const;
  // Fails if kernels might not see what NICs wrote, and no flush helps.
  Result<void> takes_nic_writes() const;
  // Orders CUDA's synchronous copies of that allocation with NICs, if CUDA can: not for memory of
  // cuMemCreate ("GPUDirect RDMA", SYNC_MEMOPS).
  void order_copies(Address address) const;
  // True if flush_writes() is needed: after it, kernels that begin later see what NICs had
  // completed. It may wait.
  bool writes_need_flush() const { return needs_flush_; }
  Result<void> flush_writes() const;
  // --- any thread: order with streams of other users of this context
  Words& counted_words() { return *counted_words_; }
  // Returns the device address of a counted word's counter.
  Address counter_of(const WatchWord& word) const;
  // Sets the counter to zero; waits for the engine's stream.
  Result<void> reset(Address counter) const;
  bool capturing(StreamHandle stream) const;
  Words& awaited_words() { return *awaited_words_; }
  Result<void> count_on(StreamHandle stream, const StreamCount& count) const;
  // Makes the stream wait until the word, one of awaited_words(), is at `value` or above.
  Result<void> wait_on(StreamHandle stream, const Word& word, std::uint64_t value) const;

  // --- engine thread: copies. Launches run in order, one at a time.
  // Returns room for the copies of the next launch; empty while too many are under way.
  std::span<DeviceCopy> room();
  // Launches the first `count` copies of room().
  Ticket launch(std::size_t count);
  // Returns the number that launch() will return next.
  Ticket next() const { return issued_ + 1; }
  bool ended(Ticket ticket) const { return ticket <= ended_; }
  Ticket issued() const { return issued_; }
  std::size_t under_way() const { return issued_ - ended_; }
  bool busy() const { return under_way() > 0; }
  // Reads how far the GPU got. Returns how many launches have ended since the last call.
  std::size_t poll();
  // Asks CUDA whether the context is alive. Returns the number of the question. If the context is
  // lost, failure() is set before the question is answered.
  std::uint64_t ask();
  bool answered(std::uint64_t question) const { return question <= answered_.load(); }
  // Begins flush_writes(), or shares one that has not begun yet. Returns its number.
  std::uint64_t begin_flush();
  bool flushed(std::uint64_t flush) const { return flush <= flushes_ended_.load(); }
  // True if an answer is still to come.
  bool asked() const { return !answered(questions_); }
  // Returns the error once CUDA has reported that the context is lost, else null. Then nothing is
  // copied any more, and copies that were under way have not arrived.
  const Error* failure() const { return failed_.load() ? &*failure_ : nullptr; }

  // Return no value while all are in use. Slots to send are in to_send(), which peers here can map.
  std::optional<StagingSlot> slot_to_send();
  const MemoryRegion& to_send() const { return *to_send_; }
  std::optional<StagingSlot> slot_to_receive();
  void give_back(std::byte* slot, bool sends);

 private:
  static constexpr std::size_t kLaunches = 16;  // under way at most
  static constexpr std::size_t kSlots = 8;      // per direction
  static constexpr std::uint64_t kSpinNs = 50'000;

  Gpu(std::shared_ptr<const Driver> driver, int device);
  ~Gpu();
  Result<void> start();
  Result<void> find_attributes();
  Result<void> load_kernels();
  Result<void> pin_memory();
  void end();
  // Makes a stream of the highest priority. Such streams share no hardware queue with those of
  // lower ones, one of them possibly waiting for work of this stream.
  Result<StreamHandle> make_stream() const;
  std::span<DeviceCopy> copies_of(Ticket ticket) const;
  // Copies on a new stream, and waits for it.
  Result<void> copy(const std::function<Status(StreamHandle)>& start, const char* call) const;
  Result<void> check(const Current& current) const {
    return check(current.status(), "cuCtxPushCurrent");
  }
  // Returns the error of a call, if it is one.
  Result<void> check(Status status, const char* call) const;
  void fail(Status status, const char* call);
  // Returns the error of a call on a stream of other users, if it is one.
  Result<void> check_stream(Status status, const char* call, StreamHandle stream) const;
  // --- the thread of calls_
  void copy_now(Ticket ticket);
  void look();

  std::shared_ptr<const Driver> driver_;
  int device_;
  std::string label_;
  Uuid uuid_;
  Context context_ = nullptr;
  StreamHandle stream_ = nullptr;
  Module module_ = nullptr;
  Function copy_kernel_ = nullptr;
  Function count_kernel_ = nullptr;
  bool needs_flush_ = false;
  bool can_flush_ = false;
  bool coherent_ = false;  // with the processor, over a link between them
  bool has_wide_words_ = false;
  bool started_ = false;
  Address counters_ = 0;  // one per counted word, then one of the launches
  // Null until they are pinned. Memory from CUDA would go with the context.
  std::shared_ptr<MemoryRegion> own_;  // the copies of all launches, then slots to receive, words
  std::shared_ptr<MemoryRegion> to_send_;
  std::optional<Staging> sending_;
  std::optional<Staging> receiving_;
  std::optional<Words> counted_words_;
  std::optional<Words> awaited_words_;

  const WatchWord* launches_ended_ = nullptr;

  // Engine thread.
  [[no_unique_address]] ThreadOwner thread_;
  struct Launch {
    unsigned copies;
    unsigned rows;
  };
  std::array<Launch, kLaunches> launches_{};  // launch n is at n % kLaunches
  Ticket issued_ = 0;
  Ticket ended_ = 0;
  std::uint64_t questions_ = 0;
  std::uint64_t stuck_since_ns_ = 0;
  std::uint64_t flushes_ = 0;

  std::atomic<std::uint64_t> answered_ = 0;
  std::atomic<std::uint64_t> flushes_begun_ = 0;
  std::atomic<std::uint64_t> flushes_ended_ = 0;
  std::optional<Error> failure_;      // written once, before failed_
  std::atomic<bool> failed_ = false;  // nothing is launched any more
  std::atomic<bool> over_ = false;    // nothing runs any more
  GpuThread& frees_;                  // the device's, in this process
  GpuThread calls_{kSpinNs};          // last: it uses all of the above
};

}  // namespace kvxfer::cuda
