// The parts of simulated_verbs.hpp: libibverbs' objects as a device keeps them, and the network
// that carries and places their writes.
#pragma once

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "doubles/simulated_gpus.hpp"
#include "doubles/simulated_verbs.hpp"
#include "fd.hpp"

namespace kvxfer::test::mlx5 {

inline constexpr int kGids = 4;
inline constexpr std::uint16_t kFullMember = 0x8000;
inline constexpr std::uint32_t kKeyTag = 0xff;  // the bits of a key that its owner may change

class Event {
 public:
  int fd() const { return fd_.get(); }
  void set() const {
    const std::uint64_t one = 1;
    [[maybe_unused]] const auto written = ::write(fd_.get(), &one, sizeof one);
  }
  void clear() const {
    std::uint64_t count = 0;
    [[maybe_unused]] const auto got = ::read(fd_.get(), &count, sizeof count);
  }

 private:
  UniqueFd fd_{::eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)};
};

struct Device : ibv_device {
  SimulatedDevice traits;
  std::uint16_t lid = 0;
  bool up = true;
  bool cut = false;
  unsigned busy = 0;  // the number of deregistrations still to refuse
  std::atomic<std::chrono::microseconds> command{};
  std::atomic<bool> silent = false;

  // A RoCE port has both versions of a link-local address, then both of an IPv4 address.
  ibv_gid gid(int index) const {
    ibv_gid gid{};
    const bool link_local = traits.infiniband || index < 2;
    if (link_local) {
      gid.raw[0] = 0xfe;
      gid.raw[1] = 0x80;
      if (traits.infiniband) gid.raw[7] = traits.rail;
    } else {
      gid.raw[10] = gid.raw[11] = 0xff;
      gid.raw[12] = 10;
      gid.raw[13] = traits.rail;
    }
    gid.raw[14] = static_cast<std::uint8_t>(lid >> 8);
    gid.raw[15] = static_cast<std::uint8_t>(lid);
    return gid;
  }
  int gids() const { return traits.infiniband ? 1 : kGids; }
  bool has(const ibv_gid& wanted) const {
    for (int index = 0; index < gids(); ++index) {
      const ibv_gid own = gid(index);
      if (std::memcmp(&own, &wanted, sizeof own) == 0) return true;
    }
    return false;
  }
};

struct Context : verbs_context {
  Device* of = nullptr;
  Event event;
  std::deque<ibv_async_event> events;

  void tell(const ibv_async_event& one) {
    events.push_back(one);
    event.set();
  }
};

struct Channel : ibv_comp_channel {
  Event event;
  std::deque<ibv_cq*> ready;
};

struct Region : ibv_mr {
  std::uint64_t begin = 0;     // the address that work requests name
  std::byte* bytes = nullptr;  // the same place in this process
  bool on_gpu = false;
  std::shared_ptr<void> mapping;  // for a dmabuf
  int access = 0;
  unsigned windows = 0;  // the number of open windows

  bool holds(std::uint64_t address, std::uint64_t size) const {
    return address >= begin && size <= length && address - begin <= length - size;
  }
};

struct Window : ibv_mw {
  Region* of = nullptr;  // null if it is closed
  std::uint32_t key = 0;
  std::uint32_t pair = 0;
  std::uint64_t address = 0;
  std::uint64_t length = 0;
};

struct Entry {
  ibv_wc completion{};
  std::uint64_t sent = 0;  // requests of the queue pair up to this one are done; 0 for a receive
};

struct CompletionQueue : ibv_cq {
  std::deque<Entry> entries;
  bool armed = false;
  bool overrun = false;
};

struct SharedReceives : ibv_srq {
  std::uint32_t capacity = 0;
  std::uint32_t limit = 0;
  std::deque<std::uint64_t> posted;
};

struct Request {
  ibv_send_wr work{};
  ibv_sge piece{};
  std::vector<std::byte> inlined;
  std::uint64_t number = 0;
};

struct QueuePair : ibv_qp {
  ibv_qp_attr attributes{};
  ibv_qp_cap limits{};
  bool signals_all = false;
  std::deque<Request> requests;
  std::uint64_t posted = 0;
  std::uint64_t polled = 0;         // posted requests whose completions were polled
  std::uint64_t unanswered_ns = 0;  // since when there is no answer; 0 if the other end answers
  std::uint64_t wait_until_ns = 0;  // as the other end had no receive
  unsigned not_ready = 0;           // how often in a row it had none
  std::vector<Landing> landings;    // arrived at this end, not in memory yet
};

inline Context& context_of(ibv_context* context) {
  return static_cast<Context&>(*verbs_get_ctx(context));
}
inline const Device& device_of(ibv_context* context) { return *context_of(context).of; }
// The time that a sender waits if there was no receive, by the receiver's min_rnr_timer.
std::uint64_t receiver_not_ready_ns(std::uint8_t code);

struct Network {
  mutable std::mutex mutex;
  std::condition_variable_any work;
  std::mt19937_64 random{std::random_device{}()};
  std::vector<std::unique_ptr<Device>> devices;
  std::vector<Context*> contexts;
  std::map<std::uint32_t, QueuePair*> pairs;
  std::map<std::uint32_t, Region*> regions;  // lkey and rkey are equal, as in mlx5
  std::map<std::uint32_t, Window*> windows;  // by key without its tag
  std::uint32_t last_pair = 0x100;
  std::uint32_t last_key = 0x1000;
  std::atomic<std::size_t> commands_of_pollers = 0;
  std::jthread wire{[this](const std::stop_token& stop) { run(stop); }};

  Device* find(const std::string& name) {
    const auto found = std::find_if(devices.begin(), devices.end(), [&](const auto& device) {
      return device->traits.name == name;
    });
    return found == devices.end() ? nullptr : found->get();
  }

  // --- the wire's thread
  void run(const std::stop_token& stop);
  void step(QueuePair& pair, std::uint64_t now);
  QueuePair* other_end(const QueuePair& pair);
  // Returns null if the other end refuses the write.
  const Region* destination(const QueuePair& there, const ibv_send_wr& asked,
                            std::uint32_t length) const;
  ibv_wc_status change_window(const QueuePair& pair, const ibv_send_wr& asked);
  void land_some(QueuePair& pair);

  // --- any thread
  void land_all(QueuePair& pair);
  void push(ibv_cq* queue, const Entry& entry);
  void finish(QueuePair& pair, ibv_wc_status status);
  void break_pair(QueuePair& pair);
};

}  // namespace kvxfer::test::mlx5
