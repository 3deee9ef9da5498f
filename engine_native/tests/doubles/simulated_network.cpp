#include "doubles/simulated_network.hpp"

#include <array>
#include <utility>

#include "clock.hpp"

namespace kvxfer::test::mlx5 {
namespace {

// IBTA 1.4, table 45: the time that a sender waits if there was no receive, in units of 10
// microseconds, by the receiver's code.
constexpr std::array<std::uint64_t, 32> kReceiverNotReady{
    65536, 1,    2,    3,    4,    6,     8,     12,    16,    24,   32,
    48,    64,   96,   128,  192,  256,   384,   512,   768,   1024, 1536,
    2048,  3072, 4096, 6144, 8192, 12288, 16384, 24576, 32768, 49152};

}  // namespace

std::uint64_t receiver_not_ready_ns(std::uint8_t code) {
  return kReceiverNotReady[code % kReceiverNotReady.size()] * 10'000;
}

// --- the wire --------------------------------------------------------------------------------

void Network::run(const std::stop_token& stop) {
  std::unique_lock lock(mutex);
  while (!stop.stop_requested()) {
    const std::uint64_t now = now_ns();
    gpu_writes().flush(now);
    std::vector<QueuePair*> busy;
    std::size_t waiting = 0;
    bool idle = gpu_writes().empty();
    for (const auto& [number, pair] : pairs) {
      land_some(*pair);
      idle = idle && pair->landings.empty() && pair->requests.empty();
      const bool can = pair->state == IBV_QPS_RTS && !pair->requests.empty();
      if (!can || now < pair->wait_until_ns) continue;
      busy.push_back(pair);
      waiting += pair->requests.size();
    }
    if (idle) {
      work.wait(lock);
    } else if (busy.empty()) {
      work.wait_for(lock, std::chrono::microseconds(100));
    } else {
      QueuePair& pair = *busy[random() % busy.size()];
      step(pair, now);
      // The more packets wait, the rarer: a yield takes milliseconds on a busy machine.
      if (random() % waiting != 0) continue;
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    }
  }
}

// Returns null if the packet is lost, or not answered.
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
    // 7 stands for no limit.
    if (pair.attributes.rnr_retry < 7 && ++pair.not_ready > pair.attributes.rnr_retry) {
      return finish(pair, IBV_WC_RNR_RETRY_EXC_ERR);
    }
    pair.wait_until_ns = now + receiver_not_ready_ns(there->attributes.min_rnr_timer);
    return;
  }
  pair.not_ready = 0;
  const std::uint32_t length = asked.num_sge > 0 ? request.piece.length : 0;
  if (length > 0) {
    const std::byte* source = request.inlined.data();
    if (request.inlined.empty()) {
      const auto found = regions.find(request.piece.lkey);
      const Region* const region = found == regions.end() ? nullptr : found->second;
      if (!region || region->pd != pair.pd || !region->holds(request.piece.addr, length)) {
        return finish(pair, IBV_WC_LOC_PROT_ERR);
      }
      source = region->bytes + (request.piece.addr - region->begin);
    }
    const Region* const into = destination(*there, asked, length);
    const bool fails =
        into && into->mapping && device_of(there->context).traits.fails_writes_to_dmabufs;
    if (!into || fails) {
      context_of(there->context)
          .tell({.element = {.qp = there}, .event_type = IBV_EVENT_QP_ACCESS_ERR});
      break_pair(*there);
      return finish(pair, IBV_WC_REM_ACCESS_ERR);
    }
    const bool lost = into->on_gpu && device_of(there->context).traits.loses_writes_to_gpus;
    std::byte* const at = into->bytes + (asked.wr.rdma.remote_addr - into->begin);
    if (!lost)
      there->landings.push_back({at, {source, source + length}, into->on_gpu, into->mapping});
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

const Region* Network::destination(const QueuePair& there, const ibv_send_wr& asked,
                                   std::uint32_t length) const {
  if ((there.attributes.qp_access_flags & IBV_ACCESS_REMOTE_WRITE) == 0) return nullptr;
  const std::uint64_t address = asked.wr.rdma.remote_addr;
  const std::uint32_t key = asked.wr.rdma.rkey;
  if (const auto region = regions.find(key); region != regions.end()) {
    const Region& of = *region->second;
    const bool may = of.pd == there.pd && (of.access & IBV_ACCESS_REMOTE_WRITE) != 0;
    return may && of.holds(address, length) ? &of : nullptr;
  }
  const auto window = windows.find(key & ~kKeyTag);
  if (window == windows.end()) return nullptr;
  const Window& of = *window->second;
  const bool within =
      address >= of.address && length <= of.length && address - of.address <= of.length - length;
  return of.of && of.key == key && of.pair == there.qp_num && within ? of.of : nullptr;
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
  const bool good = !window.of && window.pd == pair.pd && region.pd == pair.pd &&
                    regions.contains(region.rkey) && (region.access & IBV_ACCESS_MW_BIND) != 0 &&
                    (region.access & IBV_ACCESS_LOCAL_WRITE) != 0 &&
                    region.holds(range.addr, range.length);
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
  gpu_writes().land(std::move(pair.landings.back()));
  pair.landings.pop_back();
}

void Network::land_all(QueuePair& pair) {
  std::shuffle(pair.landings.begin(), pair.landings.end(), random);
  for (Landing& each : pair.landings) gpu_writes().land(std::move(each));
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

// Ends the first request; if it failed, all others too.
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

}  // namespace kvxfer::test::mlx5
