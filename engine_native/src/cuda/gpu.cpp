#include "cuda/gpu.hpp"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <utility>

#include "memory_region.hpp"

namespace kvxfer::cuda {
namespace {

constexpr std::size_t kCopiesBytes = Gpu::kMaxCopies * sizeof(DeviceCopy);

}  // namespace

// --- its life --------------------------------------------------------------------------------

Result<std::shared_ptr<Gpu>> Gpu::open(std::shared_ptr<const Driver> driver, int device) {
  std::shared_ptr<Gpu> gpu(new Gpu(std::move(driver), device));
  if (auto good = gpu->start(); !good) return good.error();
  return gpu;
}

Gpu::Gpu(std::shared_ptr<const Driver> driver, int device)
    : driver_(std::move(driver)), device_(device), label_("GPU " + std::to_string(device)) {}

Result<void> Gpu::start() {
  const Driver& cuda = *driver_;
  int count = 0;
  if (auto good = check(cuda.device_get_count(&count), "cuDeviceGetCount"); !good) return good;
  if (device_ < 0 || device_ >= count) {
    return Error{Errc::invalid_argument, "there is no GPU " + std::to_string(device_) +
                                             "; this process sees " + std::to_string(count) +
                                             " (CUDA_VISIBLE_DEVICES)"};
  }
  std::array<char, 128> name{};
  if (cuda.device_get_name(name.data(), static_cast<int>(name.size()), device_) == kSuccess) {
    label_ += " (" + std::string(name.data()) + ")";
  }
  if (auto good = check(cuda.device_get_uuid(&uuid_, device_), "cuDeviceGetUuid"); !good) {
    return good;
  }
  if (const Status status = cuda.device_primary_ctx_retain(&context_, device_);
      status != kSuccess) {
    context_ = nullptr;
    return check(status, "cuDevicePrimaryCtxRetain");
  }
  int ordering = 0;
  int flush = 0;
  cuda.device_get_attribute(&ordering, kRdmaWritesOrdering, device_);
  cuda.device_get_attribute(&flush, kRdmaFlushOptions, device_);
  int host_tables = 0;
  cuda.device_get_attribute(&host_tables, kHostPageTables, device_);
  coherent_ = host_tables != 0;
  needs_flush_ = ordering < kOrderedForOwner;
  can_flush_ = (flush & kFlushByHost) != 0;
  const Current current(cuda, context_);
  if (auto good = check(cuda.stream_create(&stream_, kNonBlocking), "cuStreamCreate"); !good) {
    return good;
  }
  if (auto good = check(cuda.module_load_data(&module_, kPtx), "cuModuleLoadData"); !good) {
    return good;
  }
  for (const auto& [kernel, entry] :
       {std::pair(&copy_kernel_, kCopyKernel), std::pair(&count_kernel_, kCountKernel)}) {
    const Status found = cuda.module_get_function(kernel, module_, entry);
    if (auto good = check(found, "cuModuleGetFunction"); !good) return good;
  }
  for (EventHandle& event : events_) {
    if (auto good = check(cuda.event_create(&event, kDisableTiming), "cuEventCreate"); !good) {
      return good;
    }
  }
  constexpr std::size_t kCopies = kLaunches * kCopiesBytes;
  constexpr std::size_t kStaging = kSlots * kSlotBytes;
  constexpr std::size_t kAllWords = 2 * kWords * sizeof(WatchWord);
  for (const auto& [memory, bytes] :
       {std::pair(&own_, kCopies + kStaging + kAllWords), std::pair(&to_send_, kStaging)}) {
    auto made = MemoryRegion::allocate({}, bytes);
    if (!made) return made.error();
    const Status registered = cuda.mem_host_register((*made)->host(), bytes, kPortable);
    if (auto good = check(registered, "cuMemHostRegister"); !good) return good;
    *memory = std::move(*made);
  }
  std::byte* const staging = own_->host() + kCopies;
  receiving_.emplace(std::span(staging, kStaging));
  auto* const words = new (staging + kStaging) WatchWord[2 * kWords];
  counted_words_.emplace(std::span(words, kWords));
  awaited_words_.emplace(std::span(words + kWords, kWords));
  sending_.emplace(std::span(to_send_->host(), kStaging));
  return {};
}

Gpu::~Gpu() {
  if (!context_) return;
  {
    const Current current(*driver_, context_);
    if (current.status() == kSuccess) end();
  }
  driver_->device_primary_ctx_release(device_);
}

void Gpu::end() {
  if (stream_) driver_->stream_synchronize(stream_);
  for (const auto& memory : {own_, to_send_}) {
    if (memory) driver_->mem_host_unregister(memory->host());
  }
  for (EventHandle event : events_) {
    if (event) driver_->event_destroy(event);
  }
  if (module_) driver_->module_unload(module_);
  if (stream_) driver_->stream_destroy(stream_);
}

Result<void> Gpu::check(Status status, const char* call) const {
  if (status == kSuccess) return {};
  return Error{Errc::gpu_lost, label_ + ": " + call + " failed with " + driver_->name_of(status)};
}

void Gpu::fail(Status status, const char* call) {
  if (!failure_) failure_ = check(status, call).error();
}

// --- memory ----------------------------------------------------------------------------------

Result<Address> Gpu::allocate(std::size_t bytes) const {
  const Current current(*driver_, context_);
  if (auto good = check(current); !good) return good.error();
  Address address = 0;
  const Status status = driver_->mem_alloc(&address, bytes);
  if (status == kOutOfMemory) {
    return Error{Errc::out_of_memory, "cannot allocate " + std::to_string(bytes) + " bytes of " +
                                          label_ + ": " + driver_->name_of(status) +
                                          "; free memory of the GPU"};
  }
  if (auto good = check(status, "cuMemAlloc"); !good) return good.error();
  // Not on the default stream, which compute would wait for.
  Status zeroed = driver_->memset_d8_async(address, 0, bytes, stream_);
  if (zeroed == kSuccess) zeroed = driver_->stream_synchronize(stream_);
  if (auto good = check(zeroed, "cuMemsetD8Async"); !good) {
    driver_->mem_free(address);
    return good.error();
  }
  return address;
}

void Gpu::free(Address address) const {
  const Current current(*driver_, context_);
  driver_->mem_free(address);
}

// The engine's own stream would make it wait for copies of transfers, and these for it.
Result<void> Gpu::copy(const std::function<Status(StreamHandle)>& start, const char* call) const {
  const Current current(*driver_, context_);
  if (auto good = check(current); !good) return good;
  StreamHandle stream = nullptr;
  if (auto good = check(driver_->stream_create(&stream, kNonBlocking), "cuStreamCreate"); !good) {
    return good;
  }
  Status status = start(stream);
  if (status == kSuccess) status = driver_->stream_synchronize(stream);
  driver_->stream_destroy(stream);
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
    // A completion and the bytes may take different ways, and CUDA leaves their order to its users
    // (cuFlushGPUDirectRDMAWrites).
    return Error{Errc::fabric_unavailable,
                 label_ +
                     " is coherent with the processor, where a NIC's completion may overtake "
                     "its bytes; this engine does not use GPUDirect there"};
  }
  if (!needs_flush_ || can_flush_) return {};
  return Error{Errc::fabric_unavailable,
               label_ + " neither orders what NICs write nor lets this process flush it"};
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
                   " is none of the primary context of " + label_ + " (" +
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

Result<void> Gpu::wait_on(StreamHandle stream, const Word& word, std::uint64_t value) const {
  const Current current(*driver_, context_);
  if (auto good = check(current); !good) return good;
  int capturing = 0;
  if (driver_->stream_is_capturing(stream, &capturing) == kSuccess && capturing == kCapturing) {
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
  if (failure_ || under_way() >= kLaunches) return {};
  return copies_of(next());
}

std::span<DeviceCopy> Gpu::copies_of(Ticket ticket) const {
  return {reinterpret_cast<DeviceCopy*>(own_->host() + ticket % kLaunches * kCopiesBytes),
          kMaxCopies};
}

Ticket Gpu::launch(std::size_t count) {
  const std::span<DeviceCopy> copies = copies_of(next()).first(count);
  const auto longest = std::max_element(copies.begin(), copies.end(),
                                        [](auto& a, auto& b) { return a.length < b.length; });
  const Current current(*driver_, context_);
  const Ticket ticket = next();
  const DeviceCopy* entries = copies.data();
  void* parameter = static_cast<void*>(&entries);
  if (current.status() != kSuccess) {
    fail(current.status(), "cuCtxPushCurrent");
    return ticket;
  }
  const Status launched =
      driver_->launch_kernel(copy_kernel_, static_cast<unsigned>(count), rows_of(longest->length),
                             1, kCopyThreads, 1, 1, 0, stream_, &parameter, nullptr);
  if (launched != kSuccess) {
    fail(launched, "cuLaunchKernel");  // what was launched before goes on
    return ticket;
  }
  issued_ = ticket;
  const Status recorded = driver_->event_record(events_[ticket % kLaunches], stream_);
  if (recorded != kSuccess) {
    fail(recorded, "cuEventRecord");
    driver_->stream_synchronize(stream_);  // no other way to know when it ends
    ended_ = issued_;
  }
  return ticket;
}

bool Gpu::alive() {
  if (failure_) return false;
  const Current current(*driver_, context_);
  Status status = current.status();
  if (status == kSuccess) status = driver_->stream_query(stream_);
  if (status != kSuccess && status != kNotReady) fail(status, "cuStreamQuery");
  return !failure_;
}

std::size_t Gpu::poll() {
  if (!busy()) return 0;
  const Ticket before = ended_;
  const Current current(*driver_, context_);
  while (busy()) {
    const Status status = driver_->event_query(events_[(ended_ + 1) % kLaunches]);
    if (status == kNotReady) break;
    if (status != kSuccess) {
      fail(status, "a copy");
      ended_ = issued_;  // the context is lost, and all that ran in it
      break;
    }
    ++ended_;
  }
  return ended_ - before;
}

std::optional<StagingSlot> Gpu::slot_to_send() {
  std::byte* const bytes = sending_->take(ended_);
  if (!bytes) return std::nullopt;
  return StagingSlot(shared_from_this(), true, bytes);
}

std::optional<StagingSlot> Gpu::slot_to_receive() {
  std::byte* const bytes = receiving_->take(ended_);
  if (!bytes) return std::nullopt;
  return StagingSlot(shared_from_this(), false, bytes);
}

void Gpu::give_back(std::byte* slot, bool sends) {
  (sends ? *sending_ : *receiving_).give_back(slot, issued_);
}

}  // namespace kvxfer::cuda
