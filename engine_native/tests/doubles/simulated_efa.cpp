// The functions of libfabric and of its objects, over the simulated network.
#include "doubles/simulated_efa.hpp"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <iterator>
#include <mutex>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>

#include "doubles/simulated_efa_network.hpp"
#include "doubles/simulated_gpus.hpp"
#include "retire.hpp"

namespace kvxfer::test {
namespace efa {
namespace {

constexpr std::size_t kSendQueue = 256;
constexpr std::size_t kMaxWrite = std::size_t{1} << 30;
constexpr std::uint64_t kSpeed = 100'000'000'000;  // bits per second
constexpr std::uint64_t kPage = 4096;
// One of this many posts is refused although there is room.
constexpr unsigned kRefusals = 256;
constexpr int kMemoryModes = FI_MR_LOCAL | FI_MR_VIRT_ADDR | FI_MR_ALLOCATED | FI_MR_PROV_KEY;

Network* network = nullptr;  // the library's functions get no object

std::lock_guard<std::mutex> held() { return std::lock_guard(network->mutex); }

// --- fi_info ---------------------------------------------------------------------------------

char* copy_of(const char* text) { return text ? ::strdup(text) : nullptr; }

fi_info* duplicate(const fi_info* source) {
  auto* const made = new Info{};
  if (source) {
    static_cast<fi_info&>(*made) = *source;
    made->next = nullptr;
    made->tx = *source->tx_attr;
    made->rx = *source->rx_attr;
    made->ep = *source->ep_attr;
    made->of_domain = *source->domain_attr;
    made->of_fabric = *source->fabric_attr;
    made->of_domain.name = copy_of(source->domain_attr->name);
    made->of_fabric.name = copy_of(source->fabric_attr->name);
    made->of_fabric.prov_name = copy_of(source->fabric_attr->prov_name);
  }
  made->tx_attr = &made->tx;
  made->rx_attr = &made->rx;
  made->ep_attr = &made->ep;
  made->domain_attr = &made->of_domain;
  made->fabric_attr = &made->of_fabric;
  if (source && source->nic) {
    made->of_device.name = copy_of(source->nic->device_attr->name);
    made->link = *source->nic->link_attr;
    made->card.device_attr = &made->of_device;
    made->card.link_attr = &made->link;
    made->nic = &made->card;
  }
  return made;
}

void free_info(fi_info* info) {
  while (info) {
    auto* const made = static_cast<Info*>(std::exchange(info, info->next));
    for (char* const name : {made->of_domain.name, made->of_fabric.name, made->of_fabric.prov_name,
                             made->of_device.name}) {
      ::free(name);
    }
    delete made;
  }
}

bool offers(const fi_info& hints) {
  constexpr std::uint64_t kCaps = FI_MSG | FI_RMA | FI_SEND | FI_RECV | FI_READ | FI_WRITE |
                                  FI_REMOTE_READ | FI_REMOTE_WRITE | FI_REMOTE_COMM |
                                  FI_LOCAL_COMM | FI_HMEM;
  const std::string provider = hints.fabric_attr->prov_name ? hints.fabric_attr->prov_name : "efa";
  const std::string fabric = hints.fabric_attr->name ? hints.fabric_attr->name : "efa-direct";
  const int modes = kMemoryModes | ((hints.caps & FI_HMEM) != 0 ? FI_MR_HMEM : 0);
  return provider == "efa" && fabric == "efa-direct" && hints.ep_attr->type == FI_EP_RDM &&
         (hints.caps & ~kCaps) == 0 && (hints.domain_attr->mr_mode & modes) == modes &&
         ((hints.caps & FI_HMEM) == 0 || network->has_cuda);
}

int get_info(std::uint32_t version, const char*, const char*, std::uint64_t, const fi_info* hints,
             fi_info** found) {
  const auto lock = held();
  if (version < FI_VERSION(2, 1) || !offers(*hints)) return -FI_ENODATA;
  *found = nullptr;
  fi_info** last = found;
  for (const auto& device : network->devices) {
    auto* const made = static_cast<Info*>(duplicate(hints));
    made->mode = 0;
    made->tx.size = made->rx.size = kSendQueue;
    made->ep.max_msg_size = kMaxWrite;
    made->of_domain.mr_mode &= kMemoryModes | FI_MR_HMEM;
    made->of_domain.mr_key_size = sizeof(std::uint32_t);
    made->of_domain.cq_data_size = sizeof(std::uint32_t);
    made->of_domain.cq_cnt = made->of_domain.ep_cnt = 1 << 16;
    ::free(std::exchange(made->of_domain.name, copy_of((device->traits.name + "-rdm").c_str())));
    made->of_device.name = copy_of(device->traits.name.c_str());
    made->link = {.speed = kSpeed, .state = FI_LINK_UP};
    made->card.device_attr = &made->of_device;
    made->card.link_attr = &made->link;
    made->nic = &made->card;
    *std::exchange(last, &made->next) = made;
  }
  return *found ? 0 : -FI_ENODATA;
}

std::uint32_t version() { return FI_VERSION(2, 5); }
const char* text_of(int error) {
  const char* const text = ::strerrordesc_np(error);
  return text ? text : "an error of libfabric";
}

// --- opened objects --------------------------------------------------------------------------

template <class T>
int close_simply(fid* id) {
  delete &from<T>(id);
  return 0;
}

int close_memory(fid* id) {
  {
    const auto lock = held();
    network->memories.erase(from<Memory>(id).key);
  }
  return close_simply<Memory>(id);
}

int close_end(fid* id) {
  {
    const auto lock = held();
    End& end = from<End>(id);
    network->ends.erase(end.address.queue_pair);
    if (end.queue) end.queue->forget(end);
    if (end.events) {
      std::erase_if(end.events->errors, [&](const auto& error) { return error.fid == id; });
    }
    ++network->ends_closed;
  }
  return close_simply<End>(id);
}

template <class T>
fi_ops* only_closes() {
  static fi_ops ops{.size = sizeof(fi_ops), .close = close_simply<T>};
  return &ops;
}

ssize_t read_events(fid_eq* given, std::uint32_t*, void*, std::size_t, std::uint64_t) {
  const auto lock = held();
  return static_cast<Events&>(*given).errors.empty() ? -FI_EAGAIN : -FI_EAVAIL;
}

ssize_t read_event_error(fid_eq* given, fi_eq_err_entry* into, std::uint64_t) {
  const auto lock = held();
  auto& errors = static_cast<Events&>(*given).errors;
  if (errors.empty()) return -FI_EAGAIN;
  *into = errors.front();
  errors.pop_front();
  return sizeof *into;
}

int open_events(fid_fabric*, fi_eq_attr*, fid_eq** opened, void*) {
  static fi_ops_eq ops{.size = sizeof ops, .read = read_events, .readerr = read_event_error};
  auto* const made = new Events{};
  made->fid.ops = only_closes<Events>();
  made->ops = &ops;
  *opened = made;
  return 0;
}

// --- memory ----------------------------------------------------------------------------------

int add_memory(fid* domain, Memory made, std::uint64_t access, fid_mr** added) {
  static fi_ops ops{.size = sizeof ops, .close = close_memory};
  auto* const memory = new Memory(std::move(made));
  memory->fid.ops = &ops;
  memory->domain = &from<Domain>(domain);
  memory->access = access;
  const auto lock = held();
  memory->key = ++network->last_key;
  memory->mem_desc = memory;
  network->memories[memory->key] = memory;
  *added = memory;
  return 0;
}

int register_host(fid* domain, const iovec& whole, std::uint64_t access, fid_mr** added) {
  if (gpu_memory_at(whole.iov_base, whole.iov_len).bytes) return -FI_EFAULT;
  Memory made{};
  made.begin = reinterpret_cast<std::uint64_t>(whole.iov_base);
  made.size = whole.iov_len;
  made.bytes = static_cast<std::byte*>(whole.iov_base);
  return add_memory(domain, made, access, added);
}

int register_simply(fid* domain, const void* start, std::size_t size, std::uint64_t access,
                    std::uint64_t, std::uint64_t, std::uint64_t, fid_mr** added, void*) {
  return register_host(domain, {.iov_base = const_cast<void*>(start), .iov_len = size}, access,
                       added);
}

int register_with(fid* domain, const fi_mr_attr* asked, std::uint64_t flags, fid_mr** added) {
  const Domain& of = from<Domain>(domain);
  const bool by_dmabuf = (flags & ofi::kDmabuf) != 0;
  if ((flags & ~ofi::kDmabuf) != 0) return -FI_EBADFLAGS;
  if (asked->iov_count != 1) return -FI_EINVAL;
  // Without FI_HMEM the provider treats all memory as host memory.
  if (asked->iface == FI_HMEM_SYSTEM || !of.gpus) {
    return by_dmabuf ? -FI_EINVAL : register_host(domain, *asked->mr_iov, asked->access, added);
  }
  if (asked->iface != FI_HMEM_CUDA) return -FI_ENOSYS;
  Memory made;
  made.on_gpu = true;
  made.by_dmabuf = by_dmabuf;
  GpuMemory memory;
  const SimulatedEfaDevice& traits = of.device->traits;
  if (by_dmabuf) {
    const auto& dmabuf = *reinterpret_cast<const ofi::Dmabuf*>(asked->mr_iov);
    made.begin = reinterpret_cast<std::uint64_t>(dmabuf.base_address) + dmabuf.offset;
    made.size = dmabuf.size;
    if (!traits.dmabuf) return -FI_EOPNOTSUPP;
    if (dmabuf.offset % kPage != made.begin % kPage) return -FI_EINVAL;
    memory = gpu_memory_of(dmabuf.fd, dmabuf.offset, dmabuf.size);
  } else {
    made.begin = reinterpret_cast<std::uint64_t>(asked->mr_iov->iov_base);
    made.size = asked->mr_iov->iov_len;
    // The provider opens a dmabuf itself, and uses the address only if it cannot.
    if (!traits.dmabuf && !traits.peermem) return -FI_EFAULT;
    made.by_dmabuf = traits.dmabuf;
    memory = gpu_memory_at(asked->mr_iov->iov_base, made.size);
  }
  if (!memory.bytes) return -FI_EINVAL;
  made.bytes = memory.bytes;
  made.mapping = memory.mapping;
  return add_memory(domain, made, asked->access, added);
}

// --- completion queues and addresses ---------------------------------------------------------

ssize_t read_queue(fid_cq* given, void* into, std::size_t most) {
  const auto lock = held();
  auto& queue = static_cast<Queue&>(*given);
  if (queue.overrun) return -FI_EOVERRUN;
  if (queue.entries.empty()) return -FI_EAGAIN;
  if (queue.entries.front().error != 0) return -FI_EAVAIL;
  auto* const entries = static_cast<fi_cq_data_entry*>(into);
  std::size_t count = 0;
  for (; count < most && !queue.entries.empty() && queue.entries.front().error == 0; ++count) {
    entries[count] = queue.entries.front().done;
    queue.entries.pop_front();
  }
  return static_cast<ssize_t>(count);
}

ssize_t read_error(fid_cq* given, fi_cq_err_entry* into, std::uint64_t) {
  const auto lock = held();
  auto& queue = static_cast<Queue&>(*given);
  if (queue.entries.empty() || queue.entries.front().error == 0) return -FI_EAGAIN;
  *into = {.op_context = queue.entries.front().done.op_context,
           .flags = queue.entries.front().done.flags,
           .err = queue.entries.front().error};
  queue.entries.pop_front();
  return 1;
}

const char* explain(fid_cq*, int, const void*, char*, std::size_t) { return ""; }

int wait_object_of(fid* id, int command, void* into) {
  if (command != FI_GETWAIT) return -FI_ENOSYS;
  *static_cast<int*>(into) = from<Queue>(id).wakes.get();
  return 0;
}

int try_wait(fid_fabric*, fid** queues, int count) {
  const auto lock = held();
  bool may = true;
  for (int i = 0; i < count; ++i) may = from<Queue>(queues[i]).arm() && may;
  return may ? 0 : -FI_EAGAIN;
}

int open_queue(fid_domain*, fi_cq_attr* asked, fid_cq** opened, void*) {
  static fi_ops queue{
      .size = sizeof queue, .close = close_simply<Queue>, .control = wait_object_of};
  static fi_ops_cq ops{
      .size = sizeof ops, .read = read_queue, .readerr = read_error, .strerror = explain};
  if (asked->wait_obj != FI_WAIT_NONE && asked->wait_obj != FI_WAIT_FD) return -FI_ENOSYS;
  if (asked->format != FI_CQ_FORMAT_DATA) return -FI_EINVAL;
  auto* const made = new Queue{};
  made->fid.ops = &queue;
  made->ops = &ops;
  made->size = asked->size;
  *opened = made;
  return 0;
}

int insert_addresses(fid_av* given, const void* addresses, std::size_t count, fi_addr_t* numbers,
                     std::uint64_t, void*) {
  const auto lock = held();
  auto& known = static_cast<Addresses&>(*given).known;
  for (std::size_t i = 0; i < count; ++i) {
    Address address;
    std::memcpy(&address, static_cast<const std::byte*>(addresses) + i * sizeof address,
                sizeof address);
    numbers[i] = known.size();
    known.push_back(address);
  }
  return static_cast<int>(count);
}

int open_addresses(fid_domain*, fi_av_attr*, fid_av** opened, void*) {
  static fi_ops_av ops{.size = sizeof ops, .insert = insert_addresses};
  auto* const made = new Addresses{};
  made->fid.ops = only_closes<Addresses>();
  made->ops = &ops;
  *opened = made;
  return 0;
}

// --- endpoints -------------------------------------------------------------------------------

int bind_to(fid* id, fid* bound, std::uint64_t) {
  auto& end = from<End>(id);
  if (end.enabled) return -FI_EOPBADSTATE;
  if (bound->ops->close == close_simply<Queue>) end.queue = &from<Queue>(bound);
  if (bound->ops->close == close_simply<Addresses>) end.peers = &from<Addresses>(bound);
  if (bound->ops->close == close_simply<Events>) end.events = &from<Events>(bound);
  return 0;
}

int control(fid* id, int command, void*) {
  auto& end = from<End>(id);
  if (command != FI_ENABLE) return -FI_ENOSYS;
  if (!end.queue) return -FI_ENOCQ;
  if (!end.peers) return -FI_ENOAV;
  if (!end.events) return -FI_ENOEQ;
  const auto lock = held();
  end.address = {.gid = end.domain->device->gid,
                 .queue_pair = ++network->last_pair,
                 .qkey = static_cast<std::uint32_t>(network->random())};
  network->ends[end.address.queue_pair] = &end;
  end.enabled = true;
  return 0;
}

int set_option(fid* id, int level, int option, const void* value, std::size_t size) {
  auto& end = from<End>(id);
  if (level != FI_OPT_ENDPOINT) return -FI_ENOPROTOOPT;
  if (end.enabled) return -FI_EINVAL;
  if (option == ofi::kCudaCallsPermitted && size == sizeof(bool)) {
    std::memcpy(&end.may_call_cuda, value, size);
    return 0;
  }
  if (option != FI_OPT_FI_HMEM_P2P || size != sizeof(int)) return -FI_EINVAL;
  int asked = 0;
  std::memcpy(&asked, value, size);
  end.needs_peer_to_peer = asked == FI_HMEM_P2P_REQUIRED;
  return asked == FI_HMEM_P2P_DISABLED ? -FI_EOPNOTSUPP : 0;
}

int name_of_end(fid* id, void* into, std::size_t* size) {
  if (*size < sizeof(Address)) return -FI_ETOOSMALL;
  *size = sizeof(Address);
  std::memcpy(into, &from<End>(id).address, sizeof(Address));
  return 0;
}

ssize_t post_write(fid_ep* given, const fi_msg_rma* asked, std::uint64_t flags) {
  const auto lock = held();
  auto& end = static_cast<End&>(*given);
  if (!end.enabled) return -FI_EOPBADSTATE;
  if (asked->iov_count != 1 || asked->rma_iov_count != 1 || (flags & FI_INJECT) != 0) {
    return -FI_EINVAL;
  }
  const std::size_t length = asked->msg_iov->iov_len;
  if (length == 0 || length > kMaxWrite || asked->rma_iov->len != length) return -FI_EINVAL;
  if (!asked->desc || !asked->desc[0] || asked->addr >= end.peers->known.size()) return -FI_EINVAL;
  const auto& source = *static_cast<const Memory*>(asked->desc[0]);
  if (source.on_gpu && (!end.needs_peer_to_peer || end.may_call_cuda)) return -FI_EOPNOTSUPP;
  if (end.under_way >= kSendQueue) return -FI_EAGAIN;
  if (end.held.empty() && network->random() % kRefusals == 0) return -FI_EAGAIN;
  const bool counted = (flags & FI_REMOTE_CQ_DATA) != 0;
  end.held.push_back({.queue_pair = end.address.queue_pair,
                      .from = end.address.gid,
                      .to = end.peers->known[asked->addr],
                      .local_key = source.key,
                      .source = reinterpret_cast<std::uint64_t>(asked->msg_iov->iov_base),
                      .length = static_cast<std::uint32_t>(length),
                      .address = asked->rma_iov->addr,
                      .key = asked->rma_iov->key,
                      .imm = counted ? std::optional(asked->data) : std::nullopt,
                      .context = asked->context});
  ++end.under_way;
  if ((flags & FI_MORE) != 0) return 0;
  std::ranges::move(end.held, std::back_inserter(network->writes));
  end.held.clear();
  network->work.notify_one();
  return 0;
}

int open_end(fid_domain* domain, fi_info*, fid_ep** opened, void*) {
  static fi_ops ops{.size = sizeof ops, .close = close_end, .bind = bind_to, .control = control};
  static fi_ops_ep options{.size = sizeof options, .setopt = set_option};
  static fi_ops_cm names{.size = sizeof names, .getname = name_of_end};
  static fi_ops_rma writes{.size = sizeof writes, .writemsg = post_write};
  auto* const made = new End{};
  made->fid.ops = &ops;
  made->ops = &options;
  made->cm = &names;
  made->rma = &writes;
  made->domain = static_cast<Domain*>(domain);
  *opened = made;
  return 0;
}

// --- domains and fabrics ---------------------------------------------------------------------

int open_domain(fid_fabric*, fi_info* info, fid_domain** opened, void*) {
  static fi_ops_domain ops{
      .size = sizeof ops, .av_open = open_addresses, .cq_open = open_queue, .endpoint = open_end};
  static fi_ops_mr memory{.size = sizeof memory, .reg = register_simply, .regattr = register_with};
  const auto lock = held();
  const std::string name = info->nic->device_attr->name;
  const auto device = std::ranges::find_if(
      network->devices, [&](const auto& each) { return each->traits.name == name; });
  auto* const made = new Domain{};
  made->fid.ops = only_closes<Domain>();
  made->ops = &ops;
  made->mr = &memory;
  made->device = device->get();
  made->gpus = (info->caps & FI_HMEM) != 0;
  *opened = made;
  return 0;
}

int open_fabric(fi_fabric_attr*, fid_fabric** opened, void*) {
  static fi_ops_fabric ops{
      .size = sizeof ops, .domain = open_domain, .eq_open = open_events, .trywait = try_wait};
  auto* const made = new Fabric{};
  made->fid.ops = only_closes<Fabric>();
  made->ops = &ops;
  *opened = made;
  return 0;
}

}  // namespace

}  // namespace efa

SimulatedEfa::SimulatedEfa() : network_(std::make_unique<efa::Network>()) {
  efa::network = network_.get();
}

SimulatedEfa::~SimulatedEfa() {
  await_retired();  // memory is deregistered here
  {
    const auto lock = efa::held();
    network_->wire.request_stop();
  }
  network_->work.notify_all();
  network_->wire.join();
}

std::shared_ptr<const ofi::Libfabric> SimulatedEfa::library() const {
  return std::make_shared<ofi::Libfabric>(ofi::Libfabric{.getinfo = efa::get_info,
                                                         .freeinfo = efa::free_info,
                                                         .dupinfo = efa::duplicate,
                                                         .fabric = efa::open_fabric,
                                                         .version = efa::version,
                                                         .strerror = efa::text_of});
}

void SimulatedEfa::add(const SimulatedEfaDevice& device) {
  const auto lock = efa::held();
  network_->devices.push_back(std::make_unique<efa::Device>(
      efa::Device{.traits = device, .gid = network_->devices.size() + 1}));
}

void SimulatedEfa::have_cuda(bool has) {
  const auto lock = efa::held();
  network_->has_cuda = has;
}

void SimulatedEfa::hold(bool held) {
  const auto lock = efa::held();
  network_->holds = held;
  if (held) network_->end_landed();
  network_->work.notify_one();
}

void SimulatedEfa::withhold_arrivals(bool withheld) {
  const auto lock = efa::held();
  network_->withholds_arrivals = withheld;
}

void SimulatedEfa::report_error(const std::string& device, ErrorOf of) {
  const auto lock = efa::held();
  auto& ends = network_->ends;
  const auto last = std::find_if(ends.rbegin(), ends.rend(), [&](const auto& each) {
    return each.second->domain->device->traits.name == device;
  });
  if (last == ends.rend()) throw std::runtime_error(device + " has no endpoint");
  efa::End& end = *last->second;
  fid* const fids[] = {&end.fid, &end.domain->fid, nullptr};
  end.events->errors.push_back({.fid = fids[static_cast<std::size_t>(of)], .err = FI_EIO});
}

std::size_t SimulatedEfa::ends_closed() const {
  const auto lock = efa::held();
  return network_->ends_closed;
}

void SimulatedEfa::swallow(const std::string& from, const std::string& to, bool swallows) {
  const auto lock = efa::held();
  const auto gid_of = [&](const std::string& name) {
    const auto device = std::ranges::find_if(
        network_->devices, [&](const auto& each) { return each->traits.name == name; });
    return (*device)->gid;
  };
  const std::pair direction(gid_of(from), gid_of(to));
  if (swallows) {
    network_->swallows.insert(direction);
  } else {
    network_->swallows.erase(direction);
  }
}

std::size_t SimulatedEfa::swallowed() const {
  const auto lock = efa::held();
  return network_->swallowed;
}

SimulatedEfa& simulated_efa() {
  static SimulatedEfa efa;
  return efa;
}

}  // namespace kvxfer::test
