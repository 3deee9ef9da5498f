#include "simulated_verbs.hpp"

#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <mutex>
#include <optional>
#include <random>
#include <thread>
#include <utility>

#include "clock.hpp"
#include "fd.hpp"

namespace kvxfer::test::mlx5 {

constexpr int kMaxCqe = (1 << 22) - 1;
constexpr int kMaxQpWr = 1 << 15;
constexpr int kGids = 4;
constexpr std::uint32_t kMaxInline = 512;
constexpr std::uint64_t kMaxWindow = std::uint64_t{1} << 31;
constexpr std::uint16_t kFullMember = 0x8000;
constexpr std::uint64_t kReceiverNotReadyNs = 4'000'000;  // code 18 of IBTA 1.4, table 45
constexpr std::uint32_t kKeyTag = 0xff;                   // of a key: its owner's to change

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
  unsigned busy = 0;  // refusals to deregister that are left
  std::atomic<std::chrono::microseconds> command{};

  // RoCE: both versions of a link-local address, then both of an IPv4 address.
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
  int access = 0;
  unsigned windows = 0;  // that are open
};

struct Window : ibv_mw {
  Region* of = nullptr;  // null: it is closed
  std::uint32_t key = 0;
  std::uint32_t pair = 0;
  std::uint64_t address = 0;
  std::uint64_t length = 0;
};

struct Entry {
  ibv_wc completion{};
  std::uint64_t sent = 0;  // the queue pair's requests up to this one are done; 0: it is a receive
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

// Bytes that have come and are not in memory yet.
struct Landing {
  std::byte* at;
  std::vector<std::byte> bytes;
};

struct QueuePair : ibv_qp {
  ibv_qp_attr attributes{};
  ibv_qp_cap limits{};
  bool signals_all = false;
  std::deque<Request> requests;
  std::uint64_t posted = 0;
  std::uint64_t polled = 0;         // of those
  std::uint64_t unanswered_ns = 0;  // since when; 0: the other end answers
  std::uint64_t wait_until_ns = 0;  // it had no receive
  unsigned not_ready = 0;           // how often in a row
  std::vector<Landing> landings;    // at this end
};

Context& context_of(ibv_context* context) { return static_cast<Context&>(*verbs_get_ctx(context)); }
const Device& device_of(ibv_context* context) { return *context_of(context).of; }
void run_command(ibv_context* context) {
  std::this_thread::sleep_for(device_of(context).command.load());
}

// Whether these states, and the attributes that they ask for, are those of man ibv_modify_qp.
bool is_valid_change(ibv_qp_state from, ibv_qp_state to, int mask) {
  const auto has = [mask](int required) { return (mask & required) == required; };
  if (to == IBV_QPS_ERR || to == IBV_QPS_RESET) return true;
  if (from == IBV_QPS_RESET && to == IBV_QPS_INIT) {
    return has(IBV_QP_PKEY_INDEX | IBV_QP_PORT | IBV_QP_ACCESS_FLAGS);
  }
  if (from == IBV_QPS_INIT && to == IBV_QPS_RTR) {
    return has(IBV_QP_AV | IBV_QP_PATH_MTU | IBV_QP_DEST_QPN | IBV_QP_RQ_PSN |
               IBV_QP_MAX_DEST_RD_ATOMIC | IBV_QP_MIN_RNR_TIMER);
  }
  return from == IBV_QPS_RTR && to == IBV_QPS_RTS &&
         has(IBV_QP_TIMEOUT | IBV_QP_RETRY_CNT | IBV_QP_RNR_RETRY | IBV_QP_SQ_PSN |
             IBV_QP_MAX_QP_RD_ATOMIC);
}

void take_over(ibv_qp_attr& into, const ibv_qp_attr& from, int mask) {
  if (mask & IBV_QP_PKEY_INDEX) into.pkey_index = from.pkey_index;
  if (mask & IBV_QP_PORT) into.port_num = from.port_num;
  if (mask & IBV_QP_ACCESS_FLAGS) into.qp_access_flags = from.qp_access_flags;
  if (mask & IBV_QP_AV) into.ah_attr = from.ah_attr;
  if (mask & IBV_QP_PATH_MTU) into.path_mtu = from.path_mtu;
  if (mask & IBV_QP_DEST_QPN) into.dest_qp_num = from.dest_qp_num;
  if (mask & IBV_QP_RQ_PSN) into.rq_psn = from.rq_psn;
  if (mask & IBV_QP_SQ_PSN) into.sq_psn = from.sq_psn;
  if (mask & IBV_QP_TIMEOUT) into.timeout = from.timeout;
  if (mask & IBV_QP_RETRY_CNT) into.retry_cnt = from.retry_cnt;
  if (mask & IBV_QP_RNR_RETRY) into.rnr_retry = from.rnr_retry;
}

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
  std::byte* destination(const QueuePair& there, const ibv_send_wr& asked, std::uint32_t length);
  ibv_wc_status change_window(const QueuePair& pair, const ibv_send_wr& asked);
  void land_some(QueuePair& pair);

  // --- any thread
  void land_all(QueuePair& pair);
  void push(ibv_cq* queue, const Entry& entry);
  void finish(QueuePair& pair, ibv_wc_status status);
  void break_pair(QueuePair& pair);
};

// --- the wire --------------------------------------------------------------------------------

void Network::run(const std::stop_token& stop) {
  std::unique_lock lock(mutex);
  while (!stop.stop_requested()) {
    const std::uint64_t now = now_ns();
    std::vector<QueuePair*> busy;
    bool idle = true;
    for (const auto& [number, pair] : pairs) {
      land_some(*pair);
      idle = idle && pair->landings.empty() && pair->requests.empty();
      const bool can = pair->state == IBV_QPS_RTS && !pair->requests.empty();
      if (can && now >= pair->wait_until_ns) busy.push_back(pair);
    }
    if (idle) {
      work.wait(lock);
    } else if (busy.empty()) {
      work.wait_for(lock, std::chrono::microseconds(100));
    } else {
      QueuePair& pair = *busy[random() % busy.size()];
      step(pair, now);
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    }
  }
}

// Null where the packet is lost, or not answered.
QueuePair* Network::other_end(const QueuePair& pair) {
  const auto found = pairs.find(pair.attributes.dest_qp_num);
  if (found == pairs.end()) return nullptr;
  QueuePair& there = *found->second;
  const Device& from = device_of(pair.context);
  const Device& to = device_of(there.context);
  const ibv_ah_attr& way = pair.attributes.ah_attr;
  const std::uint16_t sent = from.traits.pkeys[pair.attributes.pkey_index];
  const std::uint16_t held = to.traits.pkeys[there.attributes.pkey_index];
  const bool receives = there.state == IBV_QPS_RTR || there.state == IBV_QPS_RTS;
  const bool arrives =
      from.up && !from.cut && to.up && !to.cut && from.traits.rail == to.traits.rail &&
      (way.is_global ? to.has(way.grh.dgid) : way.dlid == to.lid && !from.traits.grh_required) &&
      (sent & ~kFullMember) == (held & ~kFullMember) && ((sent | held) & kFullMember) != 0;
  const bool joined = receives && there.attributes.dest_qp_num == pair.qp_num &&
                      there.attributes.rq_psn == pair.attributes.sq_psn;
  return arrives && joined ? &there : nullptr;
}

void Network::step(QueuePair& pair, std::uint64_t now) {
  const Request& request = pair.requests.front();
  const ibv_send_wr& asked = request.work;
  if (asked.opcode == IBV_WR_BIND_MW || asked.opcode == IBV_WR_LOCAL_INV) {
    return finish(pair, change_window(pair, asked));
  }
  QueuePair* const there = other_end(pair);
  if (!there) {
    if (pair.unanswered_ns == 0) pair.unanswered_ns = now;
    // IBTA 1.4, 9.7.6.1.3; devices wait for up to four times as long.
    const std::uint64_t timeout = 4096ull << pair.attributes.timeout;
    if (now - pair.unanswered_ns > timeout * (pair.attributes.retry_cnt + 1u)) {
      return finish(pair, IBV_WC_RETRY_EXC_ERR);
    }
    pair.wait_until_ns = now + timeout / 16;
    return;
  }
  pair.unanswered_ns = 0;
  const bool counted = asked.opcode == IBV_WR_RDMA_WRITE_WITH_IMM;
  auto& receives = static_cast<SharedReceives&>(*there->srq);
  if (counted && receives.posted.empty()) {
    // 7 means for ever.
    if (pair.attributes.rnr_retry < 7 && ++pair.not_ready > pair.attributes.rnr_retry) {
      return finish(pair, IBV_WC_RNR_RETRY_EXC_ERR);
    }
    pair.wait_until_ns = now + kReceiverNotReadyNs;
    return;
  }
  pair.not_ready = 0;
  const std::uint32_t length = asked.num_sge > 0 ? request.piece.length : 0;
  if (length > 0) {
    const auto* source = reinterpret_cast<const std::byte*>(request.piece.addr);
    if (request.inlined.empty()) {
      const auto region = regions.find(request.piece.lkey);
      const auto* const begin =
          region == regions.end() ? nullptr : static_cast<std::byte*>(region->second->addr);
      if (!begin || region->second->pd != pair.pd || source < begin ||
          source + length > begin + region->second->length) {
        return finish(pair, IBV_WC_LOC_PROT_ERR);
      }
    } else {
      source = request.inlined.data();
    }
    std::byte* const at = destination(*there, asked, length);
    if (!at) {
      context_of(there->context)
          .tell({.element = {.qp = there}, .event_type = IBV_EVENT_QP_ACCESS_ERR});
      break_pair(*there);
      return finish(pair, IBV_WC_REM_ACCESS_ERR);
    }
    there->landings.push_back({at, {source, source + length}});
  }
  if (counted) {
    land_all(*there);
    Entry arrived{.completion = {.wr_id = receives.posted.front(),
                                 .status = IBV_WC_SUCCESS,
                                 .opcode = IBV_WC_RECV_RDMA_WITH_IMM,
                                 .byte_len = length}};
    arrived.completion.imm_data = asked.imm_data;
    arrived.completion.qp_num = there->qp_num;
    arrived.completion.wc_flags = IBV_WC_WITH_IMM;
    receives.posted.pop_front();
    push(there->recv_cq, arrived);
    if (receives.posted.size() < receives.limit) {
      receives.limit = 0;
      context_of(there->context)
          .tell({.element = {.srq = there->srq}, .event_type = IBV_EVENT_SRQ_LIMIT_REACHED});
    }
  } else if (asked.send_flags & IBV_SEND_SIGNALED) {
    land_all(*there);
  }
  finish(pair, IBV_WC_SUCCESS);
}

// Null where the other end refuses the write.
std::byte* Network::destination(const QueuePair& there, const ibv_send_wr& asked,
                                std::uint32_t length) {
  if ((there.attributes.qp_access_flags & IBV_ACCESS_REMOTE_WRITE) == 0) return nullptr;
  const std::uint64_t address = asked.wr.rdma.remote_addr;
  const std::uint32_t key = asked.wr.rdma.rkey;
  std::uint64_t begin = 0;
  std::uint64_t size = 0;
  if (const auto region = regions.find(key); region != regions.end()) {
    const Region& of = *region->second;
    if (of.pd != there.pd || (of.access & IBV_ACCESS_REMOTE_WRITE) == 0) return nullptr;
    begin = reinterpret_cast<std::uint64_t>(of.addr);
    size = of.length;
  } else if (const auto window = windows.find(key & ~kKeyTag); window != windows.end()) {
    const Window& of = *window->second;
    if (!of.of || of.key != key || of.pair != there.qp_num) return nullptr;
    begin = of.address;
    size = of.length;
  }
  const bool within = address >= begin && length <= size && address - begin <= size - length;
  return within ? reinterpret_cast<std::byte*>(address) : nullptr;
}

ibv_wc_status Network::change_window(const QueuePair& pair, const ibv_send_wr& asked) {
  if (asked.opcode == IBV_WR_LOCAL_INV) {
    const auto found = windows.find(asked.invalidate_rkey & ~kKeyTag);
    if (found == windows.end() || found->second->key != asked.invalidate_rkey ||
        !found->second->of || found->second->pair != pair.qp_num) {
      return IBV_WC_MW_BIND_ERR;
    }
    --std::exchange(found->second->of, nullptr)->windows;
    return IBV_WC_SUCCESS;
  }
  auto& window = static_cast<Window&>(*asked.bind_mw.mw);
  const ibv_mw_bind_info& range = asked.bind_mw.bind_info;
  auto& region = static_cast<Region&>(*range.mr);
  const auto begin = reinterpret_cast<std::uint64_t>(region.addr);
  const bool good = !window.of && window.pd == pair.pd && region.pd == pair.pd &&
                    regions.contains(region.rkey) && (region.access & IBV_ACCESS_MW_BIND) != 0 &&
                    (region.access & IBV_ACCESS_LOCAL_WRITE) != 0 && range.addr >= begin &&
                    range.addr + range.length <= begin + region.length;
  if (!good) return IBV_WC_MW_BIND_ERR;
  window.of = &region;
  window.key = asked.bind_mw.rkey;
  window.pair = pair.qp_num;
  window.address = range.addr;
  window.length = range.length;
  ++region.windows;
  return IBV_WC_SUCCESS;
}

void Network::land_some(QueuePair& pair) {
  if (pair.landings.empty()) return;
  const std::size_t one = random() % (2 * pair.landings.size());
  if (one >= pair.landings.size()) return;
  std::swap(pair.landings[one], pair.landings.back());
  const Landing& last = pair.landings.back();
  std::memcpy(last.at, last.bytes.data(), last.bytes.size());
  pair.landings.pop_back();
}

void Network::land_all(QueuePair& pair) {
  std::shuffle(pair.landings.begin(), pair.landings.end(), random);
  for (const Landing& each : pair.landings) {
    std::memcpy(each.at, each.bytes.data(), each.bytes.size());
  }
  pair.landings.clear();
}

// --- ends of requests ------------------------------------------------------------------------

void Network::push(ibv_cq* to, const Entry& entry) {
  auto& queue = static_cast<CompletionQueue&>(*to);
  if (queue.overrun) return;
  if (queue.entries.size() >= static_cast<std::size_t>(queue.cqe)) {
    queue.overrun = true;
    context_of(queue.context).tell({.element = {.cq = to}, .event_type = IBV_EVENT_CQ_ERR});
    return;
  }
  queue.entries.push_back(entry);
  if (!std::exchange(queue.armed, false)) return;
  auto& channel = static_cast<Channel&>(*queue.channel);
  channel.ready.push_back(to);
  channel.event.set();
}

// The first request, and where it failed, all others.
void Network::finish(QueuePair& pair, ibv_wc_status status) {
  const Request request = std::move(pair.requests.front());
  pair.requests.pop_front();
  const bool signalled = pair.signals_all || (request.work.send_flags & IBV_SEND_SIGNALED) != 0;
  if (signalled || status != IBV_WC_SUCCESS) {
    Entry entry{.completion = {.wr_id = request.work.wr_id, .status = status},
                .sent = request.number};
    entry.completion.qp_num = pair.qp_num;
    push(pair.send_cq, entry);
  }
  if (status != IBV_WC_SUCCESS && status != IBV_WC_WR_FLUSH_ERR) break_pair(pair);
}

void Network::break_pair(QueuePair& pair) {
  land_all(pair);
  pair.state = IBV_QPS_ERR;
  while (!pair.requests.empty()) finish(pair, IBV_WC_WR_FLUSH_ERR);
}

// --- libibverbs ------------------------------------------------------------------------------

Network* network = nullptr;  // the library's functions are given no object

int refused(int error) {
  errno = error;
  return error;
}
template <class T>
T* refused_with(int error) {
  errno = error;
  return nullptr;
}

ibv_device** get_device_list(int* count) {
  const std::lock_guard lock(network->mutex);
  auto** const list = new ibv_device* [network->devices.size() + 1] {};
  std::transform(network->devices.begin(), network->devices.end(), list,
                 [](const auto& device) { return device.get(); });
  if (count) *count = static_cast<int>(network->devices.size());
  return list;
}
void free_device_list(ibv_device** list) { delete[] list; }

int query_device(ibv_context* context, ibv_device_attr* limits) {
  const SimulatedDevice& traits = device_of(context).traits;
  *limits = {};
  limits->max_qp = 1 << 17;
  limits->max_qp_wr = kMaxQpWr;
  limits->max_cqe = kMaxCqe;
  limits->max_srq_wr = traits.max_srq_wr;
  limits->phys_port_cnt = 1;
  limits->max_pkeys = static_cast<std::uint16_t>(traits.pkeys.size());
  if (traits.windows) limits->device_cap_flags = IBV_DEVICE_MEM_WINDOW_TYPE_2B;
  return 0;
}

int query_port(ibv_context* context, std::uint8_t, ibv_port_attr* port, std::size_t) {
  const std::lock_guard lock(network->mutex);
  const Device& device = device_of(context);
  *port = {};
  port->state = device.up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
  port->max_mtu = port->active_mtu = IBV_MTU_4096;
  port->gid_tbl_len = device.gids();
  port->pkey_tbl_len = static_cast<std::uint16_t>(device.traits.pkeys.size());
  port->lid = device.traits.infiniband ? device.lid : 0;
  port->active_width = 2;    // four lanes
  port->active_speed = 128;  // of 100 Gbit/s
  port->link_layer = device.traits.infiniband ? IBV_LINK_LAYER_INFINIBAND : IBV_LINK_LAYER_ETHERNET;
  port->flags = device.traits.grh_required ? IBV_QPF_GRH_REQUIRED : 0;
  return 0;
}

int query_pkey(ibv_context* context, std::uint8_t, int index, __be16* key) {
  const auto& keys = device_of(context).traits.pkeys;
  if (index < 0 || index >= static_cast<int>(keys.size())) return -1;
  *key = htobe16(keys[static_cast<std::size_t>(index)]);
  return 0;
}

ssize_t query_gid_table(ibv_context* context, ibv_gid_entry* entries, std::size_t room,
                        std::uint32_t, std::size_t) {
  const Device& device = device_of(context);
  const auto count = std::min(room, static_cast<std::size_t>(device.gids()));
  for (std::size_t index = 0; index < count; ++index) {
    entries[index] = {.gid = device.gid(static_cast<int>(index)),
                      .gid_index = static_cast<std::uint32_t>(index),
                      .port_num = 1,
                      .gid_type = device.traits.infiniband ? IBV_GID_TYPE_IB
                                  : index % 2 == 0         ? IBV_GID_TYPE_ROCE_V1
                                                           : IBV_GID_TYPE_ROCE_V2,
                      .ndev_ifindex = 0};
  }
  return static_cast<ssize_t>(count);
}

int get_async_event(ibv_context* context, ibv_async_event* event) {
  const std::lock_guard lock(network->mutex);
  Context& own = context_of(context);
  own.event.clear();
  if (own.events.empty()) return errno = EAGAIN, -1;
  *event = own.events.front();
  own.events.pop_front();
  return 0;
}
void ack_async_event(ibv_async_event*) {}

ibv_pd* alloc_pd(ibv_context* context) { return new ibv_pd{.context = context, .handle = 0}; }
int dealloc_pd(ibv_pd* pd) {
  delete pd;
  return 0;
}

ibv_mr* reg_mr(ibv_pd* pd, void* address, std::size_t length, std::uint64_t, unsigned int access) {
  const std::lock_guard lock(network->mutex);
  auto* const region = new Region;
  network->last_key += kKeyTag + 1;
  static_cast<ibv_mr&>(*region) = {.context = pd->context,
                                   .pd = pd,
                                   .addr = address,
                                   .length = length,
                                   .handle = 0,
                                   .lkey = network->last_key,
                                   .rkey = network->last_key};
  region->access = static_cast<int>(access);
  network->regions[region->rkey] = region;
  return region;
}
int dereg_mr(ibv_mr* given) {
  run_command(given->context);
  const std::lock_guard lock(network->mutex);
  auto* const region = static_cast<Region*>(given);
  Device& device = *context_of(given->context).of;
  if (device.busy > 0) {
    --device.busy;
    return refused(EBUSY);
  }
  if (region->windows > 0) return refused(EBUSY);
  // What has come for it is in memory before it is free.
  for (const auto& [number, pair] : network->pairs) network->land_all(*pair);
  network->regions.erase(region->rkey);
  delete region;
  return 0;
}

ibv_mw* alloc_mw(ibv_pd* pd, ibv_mw_type type) {
  run_command(pd->context);
  const std::lock_guard lock(network->mutex);
  auto* const window = new Window;
  network->last_key += kKeyTag + 1;
  window->context = pd->context;
  window->pd = pd;
  window->type = type;
  window->rkey = network->last_key;
  network->windows[window->rkey] = window;
  return window;
}
int dealloc_mw(ibv_mw* given) {
  run_command(given->context);
  const std::lock_guard lock(network->mutex);
  auto* const window = static_cast<Window*>(given);
  if (window->of) --window->of->windows;
  network->windows.erase(window->rkey & ~kKeyTag);
  delete window;
  return 0;
}

ibv_comp_channel* create_comp_channel(ibv_context* context) {
  auto* const channel = new Channel;
  channel->context = context;
  channel->fd = channel->event.fd();
  return channel;
}
int destroy_comp_channel(ibv_comp_channel* channel) {
  delete static_cast<Channel*>(channel);
  return 0;
}

ibv_cq* create_cq(ibv_context* context, int entries, void*, ibv_comp_channel* channel, int) {
  if (entries < 1 || entries > kMaxCqe) return refused_with<ibv_cq>(EINVAL);
  auto* const queue = new CompletionQueue;
  queue->context = context;
  queue->channel = channel;
  queue->cqe = entries;
  return queue;
}
int destroy_cq(ibv_cq* queue) {
  delete static_cast<CompletionQueue*>(queue);
  return 0;
}
int req_notify_cq(ibv_cq* queue, int) {
  const std::lock_guard lock(network->mutex);
  static_cast<CompletionQueue*>(queue)->armed = true;
  return 0;
}
int get_cq_event(ibv_comp_channel* given, ibv_cq** queue, void**) {
  const std::lock_guard lock(network->mutex);
  auto* const channel = static_cast<Channel*>(given);
  channel->event.clear();
  if (channel->ready.empty()) return errno = EAGAIN, -1;
  *queue = channel->ready.front();
  channel->ready.pop_front();
  return 0;
}
void ack_cq_events(ibv_cq*, unsigned int) {}

int poll_cq(ibv_cq* given, int most, ibv_wc* into) {
  const std::lock_guard lock(network->mutex);
  auto& entries = static_cast<CompletionQueue*>(given)->entries;
  int count = 0;
  for (; count < most && !entries.empty(); ++count) {
    const Entry& entry = entries.front();
    into[count] = entry.completion;
    const auto pair = network->pairs.find(entry.completion.qp_num);
    if (entry.sent > 0 && pair != network->pairs.end()) pair->second->polled = entry.sent;
    entries.pop_front();
  }
  return count;
}

ibv_srq* create_srq(ibv_pd* pd, ibv_srq_init_attr* asked) {
  if (asked->attr.max_wr > static_cast<std::uint32_t>(device_of(pd->context).traits.max_srq_wr)) {
    return refused_with<ibv_srq>(EINVAL);
  }
  auto* const receives = new SharedReceives;
  receives->context = pd->context;
  receives->pd = pd;
  receives->capacity = asked->attr.max_wr;
  return receives;
}
int modify_srq(ibv_srq* receives, ibv_srq_attr* attributes, int mask) {
  const std::lock_guard lock(network->mutex);
  if (mask != IBV_SRQ_LIMIT) return refused(EINVAL);
  static_cast<SharedReceives*>(receives)->limit = attributes->srq_limit;
  return 0;
}
int destroy_srq(ibv_srq* receives) {
  delete static_cast<SharedReceives*>(receives);
  return 0;
}
int post_srq_recv(ibv_srq* given, ibv_recv_wr* next, ibv_recv_wr** bad) {
  const std::lock_guard lock(network->mutex);
  auto& receives = static_cast<SharedReceives&>(*given);
  for (; next; next = next->next) {
    if (receives.posted.size() >= receives.capacity) {
      *bad = next;
      return ENOMEM;
    }
    receives.posted.push_back(next->wr_id);
  }
  return 0;
}

ibv_qp* create_qp(ibv_pd* pd, ibv_qp_init_attr* asked) {
  run_command(pd->context);
  const std::lock_guard lock(network->mutex);
  if (asked->cap.max_send_wr > kMaxQpWr || asked->cap.max_inline_data > kMaxInline ||
      asked->qp_type != IBV_QPT_RC) {
    return refused_with<ibv_qp>(EINVAL);
  }
  auto* const pair = new QueuePair;
  pair->context = pd->context;
  pair->pd = pd;
  pair->send_cq = asked->send_cq;
  pair->recv_cq = asked->recv_cq;
  pair->srq = asked->srq;
  pair->qp_num = ++network->last_pair & 0xffffff;
  pair->qp_type = asked->qp_type;
  pair->state = IBV_QPS_RESET;
  pair->limits = asked->cap;
  pair->signals_all = asked->sq_sig_all != 0;
  network->pairs[pair->qp_num] = pair;
  return pair;
}

int modify_qp(ibv_qp* given, ibv_qp_attr* attributes, int mask) {
  run_command(given->context);
  const std::lock_guard lock(network->mutex);
  auto& pair = static_cast<QueuePair&>(*given);
  const Device& device = device_of(pair.context);
  const auto to = attributes->qp_state;
  if ((mask & IBV_QP_STATE) == 0 || !is_valid_change(pair.state, to, mask)) return refused(EINVAL);
  const auto& way = attributes->ah_attr;
  const bool bad_key = (mask & IBV_QP_PKEY_INDEX) != 0 &&
                       (attributes->pkey_index >= device.traits.pkeys.size() ||
                        (device.traits.pkeys[attributes->pkey_index] & ~kFullMember) == 0);
  // RoCE has nothing but GIDs to address with.
  const bool bad_way = (mask & IBV_QP_AV) != 0 && ((!device.traits.infiniband && !way.is_global) ||
                                                   way.grh.sgid_index >= device.gids());
  if (bad_key || bad_way) return refused(EINVAL);
  take_over(pair.attributes, *attributes, mask);
  if (to == IBV_QPS_ERR) {
    network->break_pair(pair);
  } else {
    pair.state = to;
  }
  network->work.notify_all();
  return 0;
}

int destroy_qp(ibv_qp* given) {
  run_command(given->context);
  const std::lock_guard lock(network->mutex);
  auto* const pair = static_cast<QueuePair*>(given);
  network->land_all(*pair);
  network->pairs.erase(pair->qp_num);
  std::erase_if(context_of(pair->context).events,
                [&](const ibv_async_event& event) { return event.element.qp == given; });
  for (ibv_cq* const queue : {pair->send_cq, pair->recv_cq}) {
    std::erase_if(static_cast<CompletionQueue*>(queue)->entries,
                  [&](const Entry& entry) { return entry.completion.qp_num == pair->qp_num; });
  }
  delete pair;
  return 0;
}

// Returns why a request is refused before it is queued.
int refusal_of(const QueuePair& pair, const ibv_send_wr& asked) {
  if (pair.state != IBV_QPS_RTS && pair.state != IBV_QPS_ERR) return EINVAL;
  if (pair.posted - pair.polled >= pair.limits.max_send_wr) return ENOMEM;
  if (asked.num_sge > static_cast<int>(pair.limits.max_send_sge)) return ENOMEM;
  if ((asked.send_flags & IBV_SEND_INLINE) != 0 && asked.num_sge > 0 &&
      asked.sg_list->length > pair.limits.max_inline_data) {
    return ENOMEM;
  }
  if (asked.opcode == IBV_WR_BIND_MW && asked.bind_mw.bind_info.length > kMaxWindow) {
    return EOPNOTSUPP;
  }
  return 0;
}

int post_send(ibv_qp* given, ibv_send_wr* next, ibv_send_wr** bad) {
  const std::lock_guard lock(network->mutex);
  auto& pair = static_cast<QueuePair&>(*given);
  for (; next; next = next->next) {
    if (const int error = refusal_of(pair, *next)) {
      *bad = next;
      network->work.notify_all();
      return error;
    }
    Request request{.work = *next, .number = ++pair.posted};
    if (next->num_sge > 0) {
      request.piece = *next->sg_list;
      const auto* const from = reinterpret_cast<const std::byte*>(request.piece.addr);
      if (next->send_flags & IBV_SEND_INLINE) {
        request.inlined.assign(from, from + request.piece.length);
      }
    }
    pair.requests.push_back(std::move(request));
  }
  if (pair.state == IBV_QPS_ERR) network->break_pair(pair);
  network->work.notify_all();
  return 0;
}

const char* wc_status_str(ibv_wc_status) { return "a simulated error"; }

ibv_context* open_device(ibv_device* device) {
  auto* const context = new Context;
  context->of = static_cast<Device*>(device);
  context->sz = sizeof(verbs_context);
  context->query_port = query_port;
  ibv_context& own = context->verbs_context::context;
  own.device = device;
  own.async_fd = context->event.fd();
  own.abi_compat = __VERBS_ABI_IS_EXTENDED;
  own.ops.alloc_mw = alloc_mw;
  own.ops.dealloc_mw = dealloc_mw;
  own.ops.poll_cq = poll_cq;
  own.ops.req_notify_cq = req_notify_cq;
  own.ops.post_srq_recv = post_srq_recv;
  own.ops.post_send = post_send;
  const std::lock_guard lock(network->mutex);
  network->contexts.push_back(context);
  return &own;
}
int close_device(ibv_context* given) {
  const std::lock_guard lock(network->mutex);
  Context* const context = &context_of(given);
  std::erase(network->contexts, context);
  delete context;
  return 0;
}

}  // namespace kvxfer::test::mlx5

namespace kvxfer::test {

SimulatedVerbs& simulated_verbs() {
  static SimulatedVerbs verbs;
  return verbs;
}

std::shared_ptr<const verbs::VerbsLibrary> SimulatedVerbs::library() const {
  auto library = std::make_shared<verbs::VerbsLibrary>();
  library->get_device_list = mlx5::get_device_list;
  library->free_device_list = mlx5::free_device_list;
  library->open_device = mlx5::open_device;
  library->close_device = mlx5::close_device;
  library->query_device = mlx5::query_device;
  library->query_pkey = mlx5::query_pkey;
  library->query_gid_table = mlx5::query_gid_table;
  library->get_async_event = mlx5::get_async_event;
  library->ack_async_event = mlx5::ack_async_event;
  library->alloc_pd = mlx5::alloc_pd;
  library->dealloc_pd = mlx5::dealloc_pd;
  library->reg_mr_iova2 = mlx5::reg_mr;
  library->dereg_mr = mlx5::dereg_mr;
  library->create_comp_channel = mlx5::create_comp_channel;
  library->destroy_comp_channel = mlx5::destroy_comp_channel;
  library->create_cq = mlx5::create_cq;
  library->destroy_cq = mlx5::destroy_cq;
  library->get_cq_event = mlx5::get_cq_event;
  library->ack_cq_events = mlx5::ack_cq_events;
  library->create_srq = mlx5::create_srq;
  library->modify_srq = mlx5::modify_srq;
  library->destroy_srq = mlx5::destroy_srq;
  library->create_qp = mlx5::create_qp;
  library->modify_qp = mlx5::modify_qp;
  library->destroy_qp = mlx5::destroy_qp;
  library->wc_status_str = mlx5::wc_status_str;
  return library;
}

SimulatedVerbs::SimulatedVerbs() : network_(std::make_unique<mlx5::Network>()) {
  mlx5::network = network_.get();
}

SimulatedVerbs::~SimulatedVerbs() {
  {
    const std::lock_guard lock(network_->mutex);
    network_->wire.request_stop();
  }
  network_->work.notify_all();
  network_->wire.join();
}

void SimulatedVerbs::add(const SimulatedDevice& device) {
  const std::lock_guard lock(network_->mutex);
  auto added = std::make_unique<mlx5::Device>();
  added->node_type = IBV_NODE_CA;
  added->transport_type = IBV_TRANSPORT_IB;
  device.name.copy(added->name, sizeof added->name - 1);
  added->traits = device;
  added->command = device.command;
  added->lid = static_cast<std::uint16_t>(network_->devices.size() + 1);
  network_->devices.push_back(std::move(added));
}

void SimulatedVerbs::set_link(const std::string& name, bool up) {
  const std::lock_guard lock(network_->mutex);
  mlx5::Device& device = *network_->find(name);
  device.up = up;
  for (mlx5::Context* const context : network_->contexts) {
    if (context->of != &device) continue;
    context->tell({.element = {.port_num = 1},
                   .event_type = up ? IBV_EVENT_PORT_ACTIVE : IBV_EVENT_PORT_ERR});
  }
  network_->work.notify_all();
}

void SimulatedVerbs::cut(const std::string& name, bool off) {
  const std::lock_guard lock(network_->mutex);
  network_->find(name)->cut = off;
  network_->work.notify_all();
}

void SimulatedVerbs::delay_commands(const std::string& name, std::chrono::microseconds each) {
  const std::lock_guard lock(network_->mutex);
  network_->find(name)->command = each;
}

void SimulatedVerbs::refuse_deregistrations(const std::string& name, unsigned times) {
  const std::lock_guard lock(network_->mutex);
  network_->find(name)->busy = times;
}

std::size_t SimulatedVerbs::queue_pairs() const {
  const std::lock_guard lock(network_->mutex);
  return network_->pairs.size();
}

}  // namespace kvxfer::test
