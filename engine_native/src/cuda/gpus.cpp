#include "cuda/gpus.hpp"

#include <algorithm>
#include <array>
#include <string>

namespace kvxfer::cuda {
namespace {

struct Attributes {
  Context context = nullptr;
  std::uint32_t type = 0;
  std::uint32_t managed = 0;
  int device = 0;

  bool on_device() const { return type == kOnDevice && managed == 0; }
};

// Needs no context. Memory unknown to CUDA is no device memory; there is none before cuInit().
Result<Attributes> attributes_of(const Driver& driver, Address address) {
  Attributes found;
  std::array<int, 4> wanted{kContextOf, kMemoryType, kIsManaged, kDeviceOrdinal};
  std::array<void*, 4> answers{static_cast<void*>(&found.context), &found.type, &found.managed,
                               &found.device};
  const Status status = driver.pointer_get_attributes(static_cast<unsigned>(wanted.size()),
                                                      wanted.data(), answers.data(), address);
  if (status == kSuccess) return found;
  if (status == kInvalidValue || status == kNotInitialized) return Attributes{};
  return Error{Errc::gpu_lost, "CUDA cannot say whose memory address " + std::to_string(address) +
                                   " is (" + driver.name_of(status) + "); restart this process"};
}

}  // namespace

// --- any thread ------------------------------------------------------------------------------

Result<std::shared_ptr<const Driver>> Gpus::driver() {
  const std::lock_guard lock(opening_);
  if (driver_) return driver_;
  auto loaded = Driver::load();
  if (loaded) driver_ = *loaded;
  return loaded;
}

std::shared_ptr<Gpu> Gpus::find(int device) const {
  const std::lock_guard lock(mutex_);
  const auto found = std::find_if(open_.begin(), open_.end(),
                                  [device](const auto& gpu) { return gpu->device() == device; });
  return found == open_.end() ? nullptr : *found;
}

Result<std::shared_ptr<Gpu>> Gpus::open(int device) {
  auto cuda = driver();
  if (!cuda) return cuda.error();
  const std::lock_guard opening(opening_);
  if (auto known = find(device)) return known;
  auto gpu = Gpu::open(*cuda, device);
  if (!gpu) return gpu;
  const std::lock_guard lock(mutex_);
  open_.push_back(*gpu);
  return gpu;
}

Result<std::shared_ptr<Gpu>> Gpus::owner_of(const void* address, std::size_t bytes) {
  std::shared_ptr<const Driver> cuda;
  {
    const std::lock_guard lock(opening_);
    if (!driver_) driver_ = Driver::loaded();
    cuda = driver_;
  }
  if (!cuda) return std::shared_ptr<Gpu>();
  const auto first = reinterpret_cast<Address>(address);
  const auto begin = attributes_of(*cuda, first);
  if (!begin) return begin.error();
  if (!begin->on_device()) return std::shared_ptr<Gpu>();
  const std::string what = "cannot register " + std::to_string(bytes) + " bytes at address " +
                           std::to_string(first) + ": they ";
  // It is one allocation, or adjacent mappings of a reserved range (cuMemMap).
  bool foreign_context = false;
  auto gpu = open(begin->device);
  if (!gpu) return gpu;
  for (Address at = first; at < first + bytes;) {
    const auto part = attributes_of(*cuda, at);
    if (!part) return part.error();
    const bool there = part->on_device() && part->device == begin->device;
    const auto range = there ? (*gpu)->range_of(at) : std::nullopt;
    if (!range) {
      return Error{Errc::out_of_bounds, what + "leave the memory of GPU " +
                                            std::to_string(begin->device) + ", which has " +
                                            std::to_string(at - first) +
                                            " bytes from there; register what was allocated"};
    }
    foreign_context = foreign_context || (*gpu)->foreign(part->context);
    at = range->start + range->size;
  }
  if (foreign_context) {
    return Error{Errc::invalid_argument,
                 what + "belong to another CUDA context than the primary one of " +
                     (*gpu)->label() + "; allocate them in the primary context, as PyTorch does"};
  }
  return gpu;
}

void Gpus::expect_nic_writes(const std::shared_ptr<Gpu>& gpu) {
  if (!gpu->writes_need_flush()) return;
  const std::lock_guard lock(mutex_);
  if (std::find(flushed_.begin(), flushed_.end(), gpu) != flushed_.end()) return;
  flushed_.push_back(gpu);
  flushing_.store(true, std::memory_order_release);
}

// If it fails, the context is lost, and with it all kernels that could read those bytes.
void Gpus::flush_nic_writes() {
  std::vector<std::shared_ptr<Gpu>> flushed;
  {
    const std::lock_guard lock(mutex_);
    flushed = flushed_;
  }
  for (const auto& gpu : flushed) (void)gpu->flush_writes();
}

// --- engine thread ---------------------------------------------------------------------------

bool Gpus::busy() const {
  if (!waiting_.empty()) return true;
  const std::lock_guard lock(mutex_);
  return std::any_of(open_.begin(), open_.end(),
                     [](const auto& gpu) { return gpu->busy() || gpu->asked(); });
}

std::size_t Gpus::poll() {
  thread_.check("Gpus");
  std::size_t ended = 0;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& gpu : open_) ended += gpu->poll();
  }
  if (waiting_.empty()) return ended;
  std::vector<std::function<void()>> ready;
  std::erase_if(waiting_, [&](Waiting& waiting) {
    const bool done =
        std::all_of(waiting.until.begin(), waiting.until.end(), [](const Until& each) {
          return each.gpu->ended(each.copied) && each.gpu->flushed(each.flushed);
        });
    if (done) ready.push_back(std::move(waiting.then));
    return done;
  });
  for (const auto& then : ready) then();
  return ended + ready.size();
}

std::vector<Gpus::Until> Gpus::begin_flushes() {
  std::vector<Until> until;
  const std::lock_guard lock(mutex_);
  until.reserve(flushed_.size());
  for (const auto& gpu : flushed_) {
    until.push_back({.gpu = gpu, .flushed = gpu->begin_flush()});
  }
  return until;
}

void Gpus::after_flush(std::function<void()> then) {
  if (!flushing_.load(std::memory_order_acquire)) return then();
  after(begin_flushes(), std::move(then));
}

void Gpus::after_copies(std::function<void()> then) {
  thread_.check("Gpus");
  std::vector<Until> until;
  {
    const std::lock_guard lock(mutex_);
    for (const auto& gpu : open_) {
      if (gpu->busy()) until.push_back({.gpu = gpu, .copied = gpu->issued()});
    }
  }
  after(std::move(until), std::move(then));
}

void Gpus::after(std::vector<Until> until, std::function<void()> then) {
  if (until.empty()) return then();
  waiting_.push_back({std::move(until), std::move(then)});
}

}  // namespace kvxfer::cuda
