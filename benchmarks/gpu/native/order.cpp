#include "order.hpp"

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <thread>
#include <vector>

#include "gpu_memory.hpp"
#include "receiver.hpp"

namespace kvxfer::gpu_bench {
namespace {

constexpr std::size_t kRounds = 1000;
constexpr std::size_t kWarm = 100;
constexpr std::size_t kPayload = sizeof(std::uint64_t);
// The time until the GPU waits for the word of a round.
constexpr std::chrono::microseconds kSettle{100};

using Clock = std::chrono::steady_clock;
using Word = std::atomic_ref<std::uint64_t>;

double median(std::vector<double> of) {
  const auto middle = of.begin() + static_cast<std::ptrdiff_t>(of.size() / 2);
  std::nth_element(of.begin(), middle, of.end());
  return *middle;
}

// Both engines are in this process, so that one clock serves.
class Rounds {
 public:
  Rounds()
      : writer_(good(TransferEngine::create(options_of("local", "writer")))),
        reader_(good(TransferEngine::create(options_of("local", "reader")))),
        peer_(connect(*writer_, *reader_)),
        source_(good(writer_->allocate(kPayload))),
        destination_(good(reader_->allocate(kPayload))),
        counted_(good(writer_->stream_word(0))) {
    good(KVXFER_CUDA(cuStreamCreate, "")(&stream_, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    void* gate = nullptr;
    good(KVXFER_CUDA(cuMemHostAlloc, "")(&gate, kPayload, 0), "cuMemHostAlloc");
    gate_ = new (gate) std::uint64_t(0);
  }
  ~Rounds() {
    KVXFER_CUDA(cuStreamDestroy, "_v2")(stream_);
    KVXFER_CUDA(cuMemFreeHost, "")(gate_);
    good(writer_->deregister(source_));
    good(reader_->deregister(destination_));
  }
  Rounds(const Rounds&) = delete;
  Rounds& operator=(const Rounds&) = delete;

  struct Took {
    double spinner;
    double written;
  };
  Took run(std::uint64_t round) {
    of(source_).store(round);
    good(writer_->write(peer_, source_, descriptor_of(destination_), {.length = kPayload},
                        {.after = {.word = counted_->word(), .value = round}}));
    good(KVXFER_CUDA(cuStreamWaitValue64, "_v2")(stream_, reinterpret_cast<CUdeviceptr>(gate_),
                                                 round, CU_STREAM_WAIT_VALUE_GEQ),
         "cuStreamWaitValue64");
    good(counted_->add_on(stream_, 1));
    for (const auto settled = Clock::now() + kSettle; Clock::now() < settled;) {
    }
    const auto begun = Clock::now();
    Word(*gate_).store(round);
    const auto since = [begun] {
      return std::chrono::duration<double, std::nano>(Clock::now() - begun).count();
    };
    while (counted_->word()->value.load(std::memory_order_acquire) < round) {
    }
    const double spinner = since();
    while (of(destination_).load(std::memory_order_acquire) < round) {
    }
    const double written = since();
    for (const Completion& done : writer_->drain()) {
      if (done.code != Errc::ok) give_up(done.text);
    }
    return {spinner, written};
  }

 private:
  static Word of(const RegionPtr& region) {
    return Word(*reinterpret_cast<std::uint64_t*>(region->host()));
  }

  std::unique_ptr<TransferEngine> writer_;
  std::unique_ptr<TransferEngine> reader_;
  PeerId peer_;
  RegionPtr source_;
  RegionPtr destination_;
  std::shared_ptr<StreamWord> counted_;
  CUstream stream_ = nullptr;
  std::uint64_t* gate_ = nullptr;
};

}  // namespace

PeerId connect(TransferEngine& from, const TransferEngine& to) {
  const auto id = from.connect(to.address(), std::chrono::seconds(10));
  while (true) {
    for (const Completion& done : from.drain()) {
      if (done.code != Errc::ok) give_up(done.text);
      if (done.kind == Completion::Kind::connect && done.id == id) return done.peer;
    }
    std::this_thread::yield();
  }
}

Reactions measure_reactions() {
  Rounds rounds;
  std::vector<double> spinner;
  std::vector<double> written;
  for (std::uint64_t round = 1; round <= kWarm + kRounds; ++round) {
    const auto took = rounds.run(round);
    if (round <= kWarm) continue;
    spinner.push_back(took.spinner);
    written.push_back(took.written);
  }
  return {.spinner = median(std::move(spinner)), .written = median(std::move(written))};
}

}  // namespace kvxfer::gpu_bench
