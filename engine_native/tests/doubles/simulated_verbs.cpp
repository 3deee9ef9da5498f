// libibverbs' functions, over the simulated network.
#include "doubles/simulated_verbs.hpp"

#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <optional>
#include <utility>

#include "doubles/simulated_network.hpp"
#include "doubles/step_probe.hpp"
#include "retire.hpp"

namespace kvxfer::test::mlx5 {

constexpr int kMaxQpWr = 1 << 15;
constexpr std::uint32_t kMaxInline = 512;
constexpr std::uint64_t kMaxWindow = std::uint64_t{1} << 31;
constexpr int kMaxCqe = (1 << 22) - 1;

// True if man ibv_modify_qp permits this change of state with these attributes.
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
  if (mask & IBV_QP_MIN_RNR_TIMER) into.min_rnr_timer = from.min_rnr_timer;
}

Network* network = nullptr;  // the library's functions get no object
thread_local bool polls = false;
thread_local std::uint64_t held_up_ns = 0;

// The network's lock, which a real NIC does not have.
class Held {
 public:
  explicit Held(Network& of) : lock_(of.mutex, std::try_to_lock) {
    if (lock_) return;
    const std::uint64_t since = thread_time_ns();
    lock_.lock();
    held_up_ns += thread_time_ns() - since;
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

void run_command(ibv_context* context) {
  if (polls) ++network->commands_of_pollers;
  std::this_thread::sleep_for(device_of(context).command.load());
}

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
  const Held lock(*network);
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

// If a speed needs more bits, the kernel reports NDR to readers of active_speed alone.
void tell_speed(ibv_port_attr& port, std::size_t room, std::uint32_t code) {
  constexpr std::size_t kSpeedEx = 52;
  port.active_speed = static_cast<std::uint8_t>(std::min<std::uint32_t>(code, 128));
  if (code <= 128 || room < kSpeedEx + sizeof code) return;
  std::memcpy(reinterpret_cast<std::byte*>(&port) + kSpeedEx, &code, sizeof code);
}

int query_port(ibv_context* context, std::uint8_t, ibv_port_attr* port, std::size_t room) {
  const Held lock(*network);
  const Device& device = device_of(context);
  *port = {};
  port->state = device.up ? IBV_PORT_ACTIVE : IBV_PORT_DOWN;
  port->max_mtu = port->active_mtu = IBV_MTU_4096;
  port->gid_tbl_len = device.gids();
  port->pkey_tbl_len = static_cast<std::uint16_t>(device.traits.pkeys.size());
  port->lid = device.traits.infiniband ? device.lid : 0;
  port->active_width = device.traits.width;
  tell_speed(*port, room, device.traits.speed);
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
  const Held lock(*network);
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

ibv_mr* add_region(ibv_pd* pd, Region made) {
  const Held lock(*network);
  network->last_key += kKeyTag + 1;
  made.context = pd->context;
  made.pd = pd;
  made.lkey = made.rkey = network->last_key;
  auto* const region = new Region(made);
  network->regions[region->rkey] = region;
  return region;
}

ibv_mr* reg_mr(ibv_pd* pd, void* address, std::size_t length, std::uint64_t iova,
               unsigned int access) {
  run_command(pd->context);
  Region region;
  region.addr = address;
  region.length = length;
  region.begin = iova;
  region.bytes = static_cast<std::byte*>(address);
  region.access = static_cast<int>(access);
  if (const GpuMemory memory = gpu_memory_at(address, length); memory.bytes) {
    region.on_gpu = true;
    region.bytes = memory.bytes;
  }
  if (region.on_gpu && !device_of(pd->context).traits.peermem) return refused_with<ibv_mr>(EFAULT);
  return add_region(pd, region);
}

ibv_mr* reg_dmabuf_mr(ibv_pd* pd, std::uint64_t offset, std::size_t length, std::uint64_t iova,
                      int fd, int access) {
  run_command(pd->context);
  constexpr int kAllowed = IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE |
                           IBV_ACCESS_REMOTE_READ | IBV_ACCESS_REMOTE_ATOMIC |
                           IBV_ACCESS_RELAXED_ORDERING;
  const auto page = static_cast<std::uint64_t>(::sysconf(_SC_PAGESIZE));
  if (!device_of(pd->context).traits.dmabuf) return refused_with<ibv_mr>(EOPNOTSUPP);
  if ((access & ~kAllowed) != 0 || offset % page != iova % page) {
    return refused_with<ibv_mr>(EINVAL);
  }
  Region region;
  region.addr = reinterpret_cast<void*>(offset);
  region.length = length;
  region.begin = iova;
  region.access = access;
  region.on_gpu = true;
  const GpuMemory memory = gpu_memory_of(fd, offset, length);
  if (!memory.bytes) return refused_with<ibv_mr>(EINVAL);
  region.bytes = memory.bytes;
  region.mapping = memory.mapping;
  return add_region(pd, region);
}

int dereg_mr(ibv_mr* given) {
  run_command(given->context);
  const Held lock(*network);
  auto* const region = static_cast<Region*>(given);
  Device& device = *context_of(given->context).of;
  if (device.busy > 0) {
    --device.busy;
    return refused(EBUSY);
  }
  if (region->windows > 0) return refused(EBUSY);
  // Bytes that have arrived for the region are in memory before it is free.
  for (const auto& [number, pair] : network->pairs) network->land_all(*pair);
  network->regions.erase(region->rkey);
  delete region;
  return 0;
}

ibv_mw* alloc_mw(ibv_pd* pd, ibv_mw_type type) {
  run_command(pd->context);
  const Held lock(*network);
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
  const Held lock(*network);
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
  const Held lock(*network);
  static_cast<CompletionQueue*>(queue)->armed = true;
  return 0;
}
int get_cq_event(ibv_comp_channel* given, ibv_cq** queue, void**) {
  const Held lock(*network);
  auto* const channel = static_cast<Channel*>(given);
  channel->event.clear();
  if (channel->ready.empty()) return errno = EAGAIN, -1;
  *queue = channel->ready.front();
  channel->ready.pop_front();
  return 0;
}
void ack_cq_events(ibv_cq*, unsigned int) {}

int poll_cq(ibv_cq* given, int most, ibv_wc* into) {
  polls = polls || given->channel;
  const Held lock(*network);
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
  const Held lock(*network);
  if (mask != IBV_SRQ_LIMIT) return refused(EINVAL);
  static_cast<SharedReceives*>(receives)->limit = attributes->srq_limit;
  return 0;
}
int destroy_srq(ibv_srq* receives) {
  delete static_cast<SharedReceives*>(receives);
  return 0;
}
int post_srq_recv(ibv_srq* given, ibv_recv_wr* next, ibv_recv_wr** bad) {
  const Held lock(*network);
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
  const Held lock(*network);
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
  if (mask & IBV_QP_AV) device_of(given->context).silent.wait(true);
  const Held lock(*network);
  auto& pair = static_cast<QueuePair&>(*given);
  const Device& device = device_of(pair.context);
  const auto to = attributes->qp_state;
  if ((mask & IBV_QP_STATE) == 0 || !is_valid_change(pair.state, to, mask)) return refused(EINVAL);
  const auto& way = attributes->ah_attr;
  const bool bad_key = (mask & IBV_QP_PKEY_INDEX) != 0 &&
                       (attributes->pkey_index >= device.traits.pkeys.size() ||
                        (device.traits.pkeys[attributes->pkey_index] & ~kFullMember) == 0);
  // RoCE addresses peers only by GIDs.
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
  const Held lock(*network);
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
  const Held lock(*network);
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
  const Held lock(*network);
  network->contexts.push_back(context);
  return &own;
}
int close_device(ibv_context* given) {
  const Held lock(*network);
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
  library->reg_dmabuf_mr = mlx5::reg_dmabuf_mr;
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
  await_retired();  // memory is deregistered here
  {
    const mlx5::Held lock(*network_);
    network_->wire.request_stop();
  }
  network_->work.notify_all();
  network_->wire.join();
}

void SimulatedVerbs::add(const SimulatedDevice& device) {
  const mlx5::Held lock(*network_);
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
  const mlx5::Held lock(*network_);
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
  const mlx5::Held lock(*network_);
  network_->find(name)->cut = off;
  network_->work.notify_all();
}

void SimulatedVerbs::silence(const std::string& name, bool off) {
  const mlx5::Held lock(*network_);
  std::atomic<bool>& silent = network_->find(name)->silent;
  silent = off;
  silent.notify_all();
}

void SimulatedVerbs::delay_commands(const std::string& name, std::chrono::microseconds each) {
  const mlx5::Held lock(*network_);
  network_->find(name)->command = each;
}

void SimulatedVerbs::refuse_deregistrations(const std::string& name, unsigned times) {
  const mlx5::Held lock(*network_);
  network_->find(name)->busy = times;
}

std::size_t SimulatedVerbs::queue_pairs() const {
  const mlx5::Held lock(*network_);
  return network_->pairs.size();
}

std::size_t SimulatedVerbs::commands_of_pollers() const { return network_->commands_of_pollers; }

std::uint64_t SimulatedVerbs::held_up_ns() { return mlx5::held_up_ns; }

}  // namespace kvxfer::test
