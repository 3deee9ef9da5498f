#include "cuda/gpu.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cassert>
#include <map>
#include <mutex>
#include <utility>

#include "clock.hpp"
#include "memory_region.hpp"
#include "retire.hpp"

namespace kvxfer::cuda {
namespace {

constexpr std::size_t kCopiesBytes = Gpu::kMaxCopies * sizeof(DeviceCopy);
// The interval at which a GPU that ends no copy is asked whether it is alive.
constexpr std::uint64_t kAskNs = 10'000'000;

// The GPUs of this process that no engine uses.
class Unused {
 public:
  void add(Gpu* gpu) {
    const std::lock_guard lock(mutex_);
    gpus_.push_back(gpu);
  }
  // Returns null if there is none.
  Gpu* take(int device) {
    const std::lock_guard lock(mutex_);
    const auto found = std::find_if(gpus_.begin(), gpus_.end(),
                                    [device](Gpu* gpu) { return gpu->device() == device; });
    if (found == gpus_.end()) return nullptr;
    Gpu* const gpu = *found;
    gpus_.erase(found);
    return gpu;
  }
  std::vector<Gpu*> take_all() {
    const std::lock_guard lock(mutex_);
    return std::exchange(gpus_, {});
  }

 private:
  std::mutex mutex_;
  std::vector<Gpu*> gpus_;
};

// Never destroyed, as below.
struct Frees {
  std::mutex mutex;
  std::map<int, GpuThread> of;  // by device
};
Frees& frees() {
  static Frees* const all = new Frees;
  return *all;
}
GpuThread& frees_of(int device) {
  const std::lock_guard lock(frees().mutex);
  return frees().of.try_emplace(device, 0).first->second;
}

// Never destroyed: the driver may have ended before.
Unused& unused() {
  static Unused* const all = new Unused;
  return *all;
}

}  // namespace

// --- life cycle ------------------------------------------------------------------------------

Result<std::shared_ptr<Gpu>> Gpu::open(const std::shared_ptr<const Driver>& driver, int device) {
  const auto drop = [](Gpu* gpu) {
    if (!gpu->failed_ && !gpu->busy() && gpu->started_) return unused().add(gpu);
    gpu->frees_.post([gpu] { delete gpu; });
  };
  while (Gpu* const known = unused().take(device)) {
    std::shared_ptr<Gpu> gpu(known, drop);
    gpu->look();
    gpu->thread_.hand_over();
    if (!gpu->failure()) return gpu;
  }
  std::shared_ptr<Gpu> gpu(new Gpu(driver, device), drop);
  if (auto good = gpu->start(); !good) return good.error();
  return gpu;
}

void Gpu::end_unused() {
  await_retired();
  std::vector<GpuThread*> threads;
  {
    const std::lock_guard lock(frees().mutex);
    for (auto& [device, thread] : frees().of) threads.push_back(&thread);
  }
  for (GpuThread* const thread : threads) thread->wait();
  for (Gpu* const gpu : unused().take_all()) delete gpu;
}

Gpu::Gpu(std::shared_ptr<const Driver> driver, int device)
    : driver_(std::move(driver)),
      device_(device),
      label_("GPU " + std::to_string(device)),
      frees_(frees_of(device)) {}

Result<void> Gpu::start() {
  const Driver& cuda = *driver_;
  int count = 0;
  if (auto good = check(cuda.device_get_count(&count), "cuDeviceGetCount"); !good) return good;
  if (device_ < 0 || device_ >= count) {
    return Error{Errc::invalid_argument, "there is no GPU " + std::to_string(device_) +
                                             "; this process sees " + std::to_string(count) +
                                             " (CUDA_VISIBLE_DEVICES)"};
  }
  if (auto good = find_attributes(); !good) return good;
  if (const Status status = cuda.device_primary_ctx_retain(&context_, device_);
      status != kSuccess) {
    context_ = nullptr;
    return check(status, "cuDevicePrimaryCtxRetain");
  }
  const Current current(cuda, context_);
  if (auto good = check(current); !good) return good;
  auto stream = make_stream();
  if (!stream) return stream.error();
  stream_ = *stream;
  if (auto good = pin_memory(); !good) return good;
  return load_kernels();
}

Result<void> Gpu::find_attributes() {
  const Driver& cuda = *driver_;
  std::array<char, 128> name{};
  if (cuda.device_get_name(name.data(), static_cast<int>(name.size()), device_) == kSuccess) {
    label_ += " (" + std::string(name.data()) + ")";
  }
  if (auto good = check(cuda.device_get_uuid(&uuid_, device_), "cuDeviceGetUuid"); !good) {
    return good;
  }
  const auto attribute = [&](int which) {
    int value = 0;
    cuda.device_get_attribute(&value, which, device_);
    return value;
  };
  coherent_ = attribute(kHostPageTables) != 0;
  needs_flush_ = attribute(kRdmaWritesOrdering) < kOrderedForOwner;
  can_flush_ = (attribute(kRdmaFlushOptions) & kFlushByHost) != 0;
  has_wide_words_ = attribute(kWideWords) != 0;
  if (attribute(kHostPointers) != 0) return {};
  return Error{
      Errc::fabric_unavailable,
      label_ +
          " does not reach memory of the host at the processor's addresses "
          "(CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM), which this engine needs; keep memory "
          "for transfers on the host"};
}

Result<StreamHandle> Gpu::make_stream() const {
  int least = 0;
  int highest = 0;
  driver_->ctx_get_stream_priority_range(&least, &highest);
  StreamHandle stream = nullptr;
  const Status made = driver_->stream_create_with_priority(&stream, kNonBlocking, highest);
  if (auto good = check(made, "cuStreamCreateWithPriority"); !good) return good.error();
  return stream;
}

Result<void> Gpu::pin_memory() {
  constexpr std::size_t kCopies = kLaunches * kCopiesBytes;
  constexpr std::size_t kStaging = kSlots * kSlotBytes;
  constexpr std::size_t kAllWords = (2 * kWords + 1) * sizeof(WatchWord);
  for (const auto& [memory, bytes] :
       {std::pair(&own_, kCopies + kStaging + kAllWords), std::pair(&to_send_, kStaging)}) {
    auto made = MemoryRegion::allocate({}, bytes);
    if (!made) return made.error();
    const Status registered = driver_->mem_host_register((*made)->host(), bytes, kPortable);
    if (auto good = check(registered, "cuMemHostRegister"); !good) return good;
    *memory = std::move(*made);
  }
  std::byte* const staging = own_->host() + kCopies;
  receiving_.emplace(std::span(staging, kStaging));
  auto* const words = new (staging + kStaging) WatchWord[2 * kWords + 1];
  counted_words_.emplace(std::span(words, kWords));
  launches_ended_ = words + kWords;
  awaited_words_.emplace(std::span(words + kWords + 1, kWords));
  auto counters = allocate((kWords + 1) * sizeof(std::uint64_t));
  if (!counters) return counters.error();
  counters_ = *counters;
  sending_.emplace(std::span(to_send_->host(), kStaging));
  return {};
}

// Loads the kernels and runs each once: the first run may wait for all streams.
Result<void> Gpu::load_kernels() {
  const Driver& cuda = *driver_;
  if (auto good = check(cuda.module_load_data(&module_, kPtx), "cuModuleLoadData"); !good) {
    return good;
  }
  for (const auto& [kernel, entry] :
       {std::pair(&copy_kernel_, kCopyKernel), std::pair(&count_kernel_, kCountKernel)}) {
    const Status found = cuda.module_get_function(kernel, module_, entry);
    if (auto good = check(found, "cuModuleGetFunction"); !good) return good;
  }
  copies_of(0).front() = {};
  launches_[0] = {.copies = 1, .rows = 1};
  copy_now(0);
  if (failed_) return *failure_;
  const Status ran = cuda.stream_synchronize(stream_);
  started_ = ran == kSuccess;
  return check(ran, "cuStreamSynchronize");
}

Gpu::~Gpu() {
  calls_.wait();
  if (!context_) return;
  {
    const Current current(*driver_, context_);
    if (current.status() == kSuccess) end();
  }
  driver_->device_primary_ctx_release(device_);
}

void Gpu::end() {
  if (stream_) driver_->stream_synchronize(stream_);
  if (module_) driver_->module_unload(module_);
  if (stream_) driver_->stream_destroy(stream_);
  if (counters_) driver_->mem_free(counters_);
  for (const auto& memory : {own_, to_send_}) {
    if (memory) driver_->mem_host_unregister(memory->host());
  }
}

Result<void> Gpu::check(Status status, const char* call) const {
  if (status == kSuccess) return {};
  return Error{Errc::gpu_lost, label_ + ": " + call + " failed with " + driver_->name_of(status)};
}

// Called on the one thread that makes such calls, or before there is one.
void Gpu::fail(Status status, const char* call) {
  if (failed_) return;
  failure_ = check(status, call).error();
  failed_ = true;
}

// --- memory ----------------------------------------------------------------------------------

Result<Address> Gpu::allocate(std::size_t bytes) {
  const Current current(*driver_, context_);
  if (auto good = check(current); !good) return good.error();
  Address address = 0;
  Status status = driver_->mem_alloc(&address, bytes);
  if (status == kOutOfMemory) {
    frees_.wait();
    status = driver_->mem_alloc(&address, bytes);
  }
  if (status == kOutOfMemory) {
    return Error{Errc::out_of_memory, "cannot allocate " + std::to_string(bytes) + " bytes of " +
                                          label_ + ": " + driver_->name_of(status) +
                                          "; free memory of the GPU"};
  }
  if (auto good = check(status, "cuMemAlloc"); !good) return good.error();
  // Not on the default stream, for which computation would wait.
  Status zeroed = driver_->memset_d8_async(address, 0, bytes, stream_);
  if (zeroed == kSuccess) zeroed = driver_->stream_synchronize(stream_);
  if (auto good = check(zeroed, "cuMemsetD8Async"); !good) {
    driver_->mem_free(address);
    return good.error();
  }
  return address;
}

void Gpu::free(Address address) {
  frees_.post([this, address] {
    const Current current(*driver_, context_);
    driver_->mem_free(address);
  });
}

void Gpu::await_frees() const {
  await_retired();
  frees_.wait();
}

// Takes a new stream: on the engine's, it would wait for copies of transfers, and these for it.
Result<void> Gpu::copy(const std::function<Status(StreamHandle)>& start, const char* call) const {
  const Current current(*driver_, context_);
  if (auto good = check(current); !good) return good;
  const auto stream = make_stream();
  if (!stream) return stream.error();
  Status status = start(*stream);
  if (status == kSuccess) status = driver_->stream_synchronize(*stream);
  driver_->stream_destroy(*stream);
  return check(status, call);
}

Result<void> Gpu::read(Address from, std::span<std::byte> into) const {
  return copy(
      [&](StreamHandle stream) {
        return driver_->memcpy_dtoh_async(into.data(), from, into.size(), stream);
      },
      "cuMemcpyDtoHAsync");
}

Result<void> Gpu::write(Address to, std::span<const std::byte> from) const {
  return copy(
      [&](StreamHandle stream) {
        return driver_->memcpy_htod_async(to, from.data(), from.size(), stream);
      },
      "cuMemcpyHtoDAsync");
}

std::optional<Gpu::Range> Gpu::range_of(Address address) const {
  const Current current(*driver_, context_);
  Range range{};
  if (driver_->mem_get_address_range(&range.start, &range.size, address) != kSuccess) {
    return std::nullopt;
  }
  return range;
}

// --- memory that NICs reach ------------------------------------------------------------------

Result<Gpu::Dmabuf> Gpu::dmabuf(Address address, std::size_t bytes) const {
  const auto page = static_cast<Address>(::sysconf(_SC_PAGESIZE));
  const Address begin = address / page * page;
  const Address end = (address + bytes + page - 1) / page * page;
  const Current current(*driver_, context_);
  int fd = -1;
  const Status status =
      driver_->mem_get_handle_for_address_range(&fd, begin, end - begin, kDmabuf, 0);
  if (status == kNotSupported || status == kInvalidValue) {
    return Error{Errc::fabric_unavailable,
                 "CUDA has no dmabuf of it (" + driver_->name_of(status) +
                     "): memory of cuMemCreate has to ask for gpuDirectRDMACapable, and memory of "
                     "pools has none"};
  }
  if (auto good = check(status, "cuMemGetHandleForAddressRange"); !good) return good.error();
  ::fcntl(fd, F_SETFD, FD_CLOEXEC);
  return Dmabuf{.fd = UniqueFd(fd), .offset = address - begin};
}

Result<void> Gpu::takes_nic_writes() const {
  if (coherent_) {
    // A completion and its bytes may take different routes, and CUDA leaves their order to users
    // (cuFlushGPUDirectRDMAWrites).
    return Error{Errc::fabric_unavailable,
                 label_ +
                     " is coherent with the processor, where a NIC's completion may overtake "
                     "its bytes; this engine does not use GPUDirect there"};
  }
  if (!needs_flush_ || can_flush_) return {};
  return Error{Errc::fabric_unavailable,
               label_ + " neither orders the writes of NICs nor lets this process flush them"};
}

void Gpu::order_copies(Address address) const {
  const Current current(*driver_, context_);
  const unsigned on = 1;
  driver_->pointer_set_attribute(&on, kSyncMemops, address);
}

Result<void> Gpu::flush_writes() const {
  const Current current(*driver_, context_);
  return check(driver_->flush_gpu_direct_rdma_writes(kFlushContext, kFlushForOwner),
               "cuFlushGPUDirectRDMAWrites");
}

// --- order with streams of others ------------------------------------------------------------

Result<void> Gpu::check_stream(Status status, const char* call, StreamHandle stream) const {
  if (status != kInvalidHandle && status != kInvalidContext) return check(status, call);
  return Error{Errc::invalid_argument,
               "stream " + std::to_string(reinterpret_cast<std::uintptr_t>(stream)) +
                   " does not belong to the primary context of " + label_ + " (" +
                   driver_->name_of(status) + "); pass a stream of that GPU"};
}

Result<void> Gpu::count_on(StreamHandle stream, const StreamCount& count) const {
  const Current current(*driver_, context_);
  if (auto good = check(current); !good) return good;
  StreamCount parameter = count;
  void* parameters = &parameter;
  return check_stream(
      driver_->launch_kernel(count_kernel_, 1, 1, 1, 1, 1, 1, 0, stream, &parameters, nullptr),
      "cuLaunchKernel", stream);
}

Address Gpu::counter_of(const WatchWord& word) const {
  const WatchWord* const words = launches_ended_ - kWords;
  return counters_ + static_cast<Address>(&word - words) * sizeof(std::uint64_t);
}

Result<void> Gpu::reset(Address counter) const {
  const Current current(*driver_, context_);
  if (auto good = check(current); !good) return good;
  Status zeroed = driver_->memset_d8_async(counter, 0, sizeof(std::uint64_t), stream_);
  if (zeroed == kSuccess) zeroed = driver_->stream_synchronize(stream_);
  return check(zeroed, "cuMemsetD8Async");
}

bool Gpu::capturing(StreamHandle stream) const {
  const Current current(*driver_, context_);
  int capturing = 0;
  return driver_->stream_is_capturing(stream, &capturing) == kSuccess && capturing == kCapturing;
}

Result<void> Gpu::wait_on(StreamHandle stream, const Word& word, std::uint64_t value) const {
  if (!has_wide_words_) {
    return Error{Errc::fabric_unavailable,
                 "streams of " + label_ +
                     " cannot wait for a word (CAN_USE_64_BIT_STREAM_MEM_OPS); let a thread wait "
                     "for the counter and queue the work then"};
  }
  const Current current(*driver_, context_);
  if (auto good = check(current); !good) return good;
  if (capturing(stream)) {
    return Error{Errc::invalid_argument,
                 "a wait for a counter cannot be captured, as later runs of the graph would not "
                 "wait; queue it before the graph is launched"};
  }
  return check_stream(
      driver_->stream_wait_value64(stream, reinterpret_cast<Address>(&word), value, kAtLeast),
      "cuStreamWaitValue64", stream);
}

// --- copies ----------------------------------------------------------------------------------

std::span<DeviceCopy> Gpu::room() {
  thread_.check("Gpu");
  if (failed_ || under_way() >= kLaunches) return {};
  return copies_of(next());
}

std::span<DeviceCopy> Gpu::copies_of(Ticket ticket) const {
  return {reinterpret_cast<DeviceCopy*>(own_->host() + ticket % kLaunches * kCopiesBytes),
          kMaxCopies};
}

Ticket Gpu::launch(std::size_t count) {
  thread_.check("Gpu");
  assert(count <= kMaxCopies && under_way() < kLaunches);
  const std::span<DeviceCopy> copies = copies_of(next()).first(count);
  const auto longest = std::max_element(copies.begin(), copies.end(),
                                        [](auto& a, auto& b) { return a.length < b.length; });
  const Ticket ticket = ++issued_;
  launches_[ticket % kLaunches] = {.copies = static_cast<unsigned>(count),
                                   .rows = rows_of(longest->length)};
  calls_.post([this, ticket] { copy_now(ticket); });
  return ticket;
}

// Launches the copies, then a kernel that counts the launch in a word of host memory.
void Gpu::copy_now(Ticket ticket) {
  if (failed_) return;
  const Current current(*driver_, context_);
  if (current.status() != kSuccess) return fail(current.status(), "cuCtxPushCurrent");
  const DeviceCopy* entries = copies_of(ticket).data();
  void* of_copies = static_cast<void*>(&entries);
  const auto [copies, rows] = launches_[ticket % kLaunches];
  StreamCount count{.counter = counter_of(*launches_ended_),
                    .word = reinterpret_cast<std::uint64_t>(&launches_ended_->value),
                    .by = ticket > 0 ? 1u : 0u};
  void* of_count = &count;
  Status launched = driver_->launch_kernel(copy_kernel_, copies, rows, 1, kCopyThreads, 1, 1, 0,
                                           stream_, &of_copies, nullptr);
  if (launched == kSuccess) {
    launched =
        driver_->launch_kernel(count_kernel_, 1, 1, 1, 1, 1, 1, 0, stream_, &of_count, nullptr);
  }
  if (launched != kSuccess) fail(launched, "cuLaunchKernel");
}

// Checks the stream. Work launched before a failure goes on, unless the context is lost.
void Gpu::look() {
  const Current current(*driver_, context_);
  Status status = current.status();
  if (status == kSuccess) status = driver_->stream_query(stream_);
  if (status != kSuccess && status != kNotReady) fail(status, "cuStreamQuery");
  if (failed_ && status != kNotReady) over_ = true;
}

std::uint64_t Gpu::ask() {
  thread_.check("Gpu");
  calls_.post([this, question = ++questions_] {
    look();
    answered_ = question;
  });
  return questions_;
}

std::uint64_t Gpu::begin_flush() {
  thread_.check("Gpu");
  if (flushes_ > flushes_begun_) return flushes_;
  calls_.post([this, flush = ++flushes_] {
    flushes_begun_ = flush;
    (void)flush_writes();  // if it fails, the context is lost with all kernels that could read
    flushes_ended_ = flush;
  });
  return flushes_;
}

std::size_t Gpu::poll() {
  thread_.check("Gpu");
  if (!busy()) return 0;
  const Ticket before = ended_;
  ended_ = over_ ? issued_ : launches_ended_->value.load(std::memory_order_acquire);
  if (ended_ != before) {
    stuck_since_ns_ = 0;
  } else if (!asked()) {
    const std::uint64_t now = now_ns();
    if (stuck_since_ns_ == 0) stuck_since_ns_ = now;
    if (failed_ || now - stuck_since_ns_ > kAskNs) {
      stuck_since_ns_ = now;
      ask();
    }
  }
  return ended_ - before;
}

std::optional<StagingSlot> Gpu::slot_to_send() {
  thread_.check("Gpu");
  std::byte* const bytes = sending_->take(ended_);
  if (!bytes) return std::nullopt;
  return StagingSlot(shared_from_this(), true, bytes);
}

std::optional<StagingSlot> Gpu::slot_to_receive() {
  thread_.check("Gpu");
  std::byte* const bytes = receiving_->take(ended_);
  if (!bytes) return std::nullopt;
  return StagingSlot(shared_from_this(), false, bytes);
}

void Gpu::give_back(std::byte* slot, bool sends) {
  thread_.check("Gpu");
  (sends ? *sending_ : *receiving_).give_back(slot, issued_);
}

}  // namespace kvxfer::cuda
