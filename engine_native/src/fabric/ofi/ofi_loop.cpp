#include "fabric/ofi/ofi_loop.hpp"

#include <thread>

#include "clock.hpp"
#include "fabric/ofi/ofi_registration.hpp"

namespace kvxfer::ofi {

Result<std::unique_ptr<NicLoop>> OfiLoop::open(const std::shared_ptr<const OpenDomain>& domain,
                                               Poller& poller) {
  std::unique_ptr<OfiLoop> loop(new OfiLoop(domain, poller));
  if (auto good = loop->start(); !good) return good.error();
  return std::unique_ptr<NicLoop>(std::move(loop));
}

Result<void> OfiLoop::start() {
  for (std::shared_ptr<Endpoint>* const end : {&from_, &to_}) {
    auto made =
        Endpoint::open(domain_, poller_, {.writes = 1, .immediates = 1, .wait_object = false});
    if (!made) return made.error();
    *end = std::move(*made);
    (*end)->serve(*this, poller_);
  }
  if (auto good = from_->attach(to_->address()); !good) return good;
  return to_->attach(from_->address());
}

OfiLoop::~OfiLoop() {
  for (const auto& end : {from_, to_}) {
    if (end) end->leave(poller_);
  }
}

Result<std::shared_ptr<NicRegistration>> OfiLoop::register_memory(const MemoryRegion& region,
                                                                  MemoryWay way) {
  thread_.check("OfiLoop");
  if (region.gpu() && !from_->for_gpus()) return from_->for_gpus().error();
  return OfiRegistration::create(domain_, nullptr, region, way);
}

Result<void> OfiLoop::write(const NicRegistration& source, std::uint64_t from, const RemoteKey& to,
                            std::uint32_t bytes) {
  thread_.check("OfiLoop");
  const Endpoint::Write write{
      .sequence = ++posted_,
      .source = from,
      .descriptor = static_cast<const OfiRegistration&>(source).descriptor(),
      .length = bytes,
      .address = to.address,
      .rkey = to.rkey};
  const std::uint64_t deadline = now_ns() + kPatienceNs;
  ssize_t posted = -FI_EAGAIN;
  while (!failed_ && written_ != posted_) {
    if (posted == -FI_EAGAIN) posted = from_->post(write);
    if (posted != 0 && posted != -FI_EAGAIN) {
      return broken("the NIC refused a write" + domain_->library.failed("", posted).text);
    }
    from_->poll();
    to_->poll();
    if (now_ns() > deadline) {
      from_->close();  // before the memory of the write is freed
      to_->close();
      return broken("a write within the NIC did not end");
    }
    std::this_thread::sleep_for(kPause);
  }
  if (failed_) return broken(failed_->text);
  return {};
}

}  // namespace kvxfer::ofi
