#include "doubles/simulated_efa_network.hpp"

#include <chrono>

#include "clock.hpp"
#include "doubles/simulated_gpus.hpp"

namespace kvxfer::test::efa {

void Network::run(const std::stop_token& stop) {
  std::unique_lock lock(mutex);
  while (!stop.stop_requested()) {
    gpu_writes().flush(now_ns());
    if (!writes.empty() && !holds) {
      // The more writes there are, the more steps: a yield takes milliseconds on a busy machine.
      for (auto steps = random() % writes.size() + 1; steps > 0 && !writes.empty(); --steps) {
        step(random() % writes.size());
      }
      lock.unlock();
      std::this_thread::yield();
      lock.lock();
    } else if (gpu_writes().empty()) {
      work.wait(lock);
    } else {
      work.wait_for(lock, std::chrono::milliseconds(1));
    }
  }
}

void Network::step(std::size_t index) {
  Write& write = writes[index];
  const auto found = ends.find(write.queue_pair);
  End* const sender = found == ends.end() ? nullptr : found->second;
  // A write that has begun continues without its sender.
  if (!sender && write.bytes.empty()) return remove(index);
  if (write.halves < 2 && swallow(write.from, write.to.gid)) return remove(index);
  const int error = move(write, sender);
  if (error == 0 && !(write.told_receiver && write.told_sender)) return;
  if (error != 0 && sender) tell(*sender, write, error);
  remove(index);
}

void Network::end_landed() {
  if (withholds_arrivals) return;
  for (std::size_t index = writes.size(); index-- > 0;) {
    while (index < writes.size() && writes[index].halves == 2) step(index);
  }
}

void Network::remove(std::size_t index) {
  std::swap(writes[index], writes.back());
  writes.pop_back();
}

void Network::tell(End& sender, const Write& write, int error) {
  --sender.under_way;
  Entry ended{.error = error, .of = &sender};
  ended.done.op_context = write.context;
  ended.done.flags = FI_RMA | FI_WRITE;
  sender.queue->push(ended);
}

void Network::tell(const End& receiver, Write& write) {
  if (std::exchange(write.told_receiver, true) || !write.imm) return;
  Entry arrived{.of = &receiver};
  arrived.done.flags = FI_RMA | FI_REMOTE_WRITE | FI_REMOTE_CQ_DATA;
  arrived.done.len = write.length;
  arrived.done.data = *write.imm;
  receiver.queue->push(arrived);
}

bool Network::swallow(std::uint64_t from, std::uint64_t to) {
  if (!swallows.contains({from, to})) return false;
  ++swallowed;
  return true;
}

const Memory* Network::find(std::uint64_t key, const Domain* domain) const {
  const auto found = memories.find(key);
  return found != memories.end() && found->second->domain == domain ? found->second : nullptr;
}

int Network::move(Write& write, End* sender) {
  const auto end = ends.find(write.to.queue_pair);
  const bool there = end != ends.end() && end->second->address.qkey == write.to.qkey;
  if (write.halves < 2) return there ? land(write, sender, *end->second) : FI_ENOTCONN;
  // It has landed; its two ends get completions in any order.
  if (!write.told_receiver && !withholds_arrivals && (write.told_sender || random() % 2 == 0)) {
    if (there) tell(*end->second, write);
    write.told_receiver = true;
  } else if (!write.told_sender) {
    write.told_sender = true;
    if (sender && !swallow(write.to.gid, write.from)) tell(*sender, write, 0);
  }
  return 0;
}

// Lands one half of the write's bytes.
int Network::land(Write& write, const End* sender, const End& receiver) {
  if (write.bytes.empty()) {
    const Memory* const source = find(write.local_key, sender->domain);
    if (!source || !source->holds(write.source, write.length) || (source->access & FI_WRITE) == 0) {
      return FI_EINVAL;
    }
    const std::byte* const bytes = source->bytes + (write.source - source->begin);
    write.bytes.assign(bytes, bytes + write.length);
    write.tail_first = random() % 2 == 0;
  }
  const Memory* const into = find(write.key, receiver.domain);
  if (!into || !into->holds(write.address, write.length) || (into->access & FI_REMOTE_WRITE) == 0) {
    return FI_EINVAL;
  }
  const SimulatedEfaDevice& traits = receiver.domain->device->traits;
  if (into->by_dmabuf && traits.fails_writes_to_dmabufs) return FI_EINVAL;
  const auto middle = write.bytes.begin() + static_cast<std::ptrdiff_t>(write.length / 2);
  const bool tail = write.tail_first == (write.halves == 0);
  const auto begin = tail ? middle : write.bytes.begin();
  const auto until = tail ? write.bytes.end() : middle;
  ++write.halves;
  if (into->on_gpu && traits.loses_writes_to_gpus) return 0;
  gpu_writes().land(
      {.at = into->bytes + (write.address - into->begin) + (begin - write.bytes.begin()),
       .bytes = {begin, until},
       .on_gpu = into->on_gpu,
       .mapping = into->mapping});
  return 0;
}

}  // namespace kvxfer::test::efa
