// Moves scattered pages of a GPU from one process to another, in each way that engines of one host
// have, and prints the bandwidths beside those of the hardware. Checks every request, word by word.
//
//   kvxfer_gpu_bench          the table
//   kvxfer_gpu_bench --json   the same as one JSON object
#include <poll.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "bounds.hpp"
#include "gpu_memory.hpp"
#include "held_up.hpp"
#include "order.hpp"
#include "receiver.hpp"

namespace kvxfer::gpu_bench {
namespace {

constexpr std::size_t kPages[] = {4096, 16384, 65536, 262144};
constexpr std::size_t kTimes = 5;
constexpr std::size_t kLayers = 16;

struct Way {
  const char* name;
  const char* fabric;
  bool from_gpu;
  bool to_gpu;
};
constexpr Way kWays[] = {
    {"GPU to GPU, local", "local", true, true},   {"host to GPU, local", "local", false, true},
    {"GPU to host, local", "local", true, false}, {"host to host, local", "local", false, false},
    {"GPU to GPU, tcp", "tcp", true, true},       {"host to host, tcp", "tcp", false, false}};

struct Row {
  std::string name;
  std::size_t page;
  double bandwidth;
};

// A sending engine and its completions.
class Sender {
 public:
  explicit Sender(const Way& way)
      : engine_(good(TransferEngine::create(options_of(way.fabric, "sender")))),
        pool_(pool(*engine_, way.from_gpu)) {
    put(pool_, source_words());
  }
  ~Sender() { good(engine_->deregister(pool_)); }
  Sender(const Sender&) = delete;
  Sender& operator=(const Sender&) = delete;

  void connect(const EngineAddress& address) {
    const auto id = engine_->connect(address, std::chrono::seconds(10));
    peer_ = await(Completion::Kind::connect, id).peer;
  }
  // Sends the pages in kLayers operations, as layers are ready one after the other. Returns the
  // seconds until all are delivered.
  double send(const Receiver::Opened& to, const PageLists& pages, std::size_t page_bytes) {
    const auto begun = std::chrono::steady_clock::now();
    const std::size_t count = pages.source.size() / kLayers;
    std::vector<OperationId> layers;
    for (std::size_t layer = 0; layer < kLayers; ++layer) {
      const auto part = [&](const std::vector<std::int64_t>& list) {
        return std::span(list).subspan(layer * count, count);
      };
      layers.push_back(good(engine_->write_pages(peer_, pool_, to.destination,
                                                 {.page_length = page_bytes,
                                                  .source_pages = part(pages.source),
                                                  .destination_pages = part(pages.destination),
                                                  .source_stride = page_bytes,
                                                  .destination_stride = page_bytes},
                                                 {.imm = to.imm}))
                           .id);
    }
    for (const OperationId layer : layers) await(Completion::Kind::write, layer);
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
  }

 private:
  Completion await(Completion::Kind kind, std::uint64_t id) {
    while (true) {
      for (Completion& done : engine_->drain()) {
        if (done.code != Errc::ok) give_up(done.text);
        done_.push_back(std::move(done));
      }
      const auto found = std::find_if(done_.begin(), done_.end(), [&](const Completion& done) {
        return done.kind == kind && done.id == id;
      });
      if (found != done_.end()) {
        Completion done = std::move(*found);
        done_.erase(found);
        return done;
      }
      pollfd event{.fd = engine_->event_fd(), .events = POLLIN, .revents = 0};
      ::poll(&event, 1, -1);
    }
  }

  std::unique_ptr<TransferEngine> engine_;
  std::vector<Completion> done_;
  RegionPtr pool_;
  PeerId peer_ = 0;
};

void measure(Receiver& receiver, const Way& way, std::vector<Row>& rows) {
  const auto opened = receiver.open(way.fabric, way.to_gpu);
  Sender sender(way);
  sender.connect(opened.address);
  for (const std::size_t page : kPages) {
    const PageLists pages = draw(page, kRequestBytes);
    double best = 1e9;
    for (std::size_t i = 0; i <= kTimes; ++i) {
      const double took = sender.send(opened, pages, page);
      if (i > 0) best = std::min(best, took);
    }
    if (const auto wrong = receiver.check(page, kRequestBytes); wrong > 0) {
      give_up(std::string(way.name) + ": " + std::to_string(wrong) + " wrong words");
    }
    rows.push_back({way.name, page, static_cast<double>(kRequestBytes) / best});
  }
}

void print(const Bounds& bounds, const std::vector<Row>& rows, const Reactions& reactions,
           double held_up, const std::string& gpu) {
  std::printf("\n%s, 1 GiB per request in %zu operations, best of %zu, GB/s\n", gpu.c_str(),
              kLayers, kTimes);
  std::printf("device copy %.0f, pinned to device %.1f, to host %.1f, one TCP socket %.1f\n\n",
              bounds.device_copy / 1e9, bounds.to_device / 1e9, bounds.to_host / 1e9,
              bounds.tcp / 1e9);
  std::printf("%-22s %8s %8s %8s %8s\n", "way \\ page", "4 KiB", "16 KiB", "64 KiB", "256 KiB");
  for (std::size_t i = 0; i < rows.size(); i += std::size(kPages)) {
    std::printf("%-22s", rows[i].name.c_str());
    for (std::size_t k = 0; k < std::size(kPages); ++k) {
      std::printf(" %8.2f", rows[i + k].bandwidth / 1e9);
    }
    std::printf("\n");
  }
  const auto ratios = [&](const char* name, double of, const char* what) {
    std::printf("%-22s", what);
    for (const Row& row : rows) {
      if (row.name == name) std::printf(" %8.2f", row.bandwidth / of);
    }
    std::printf("\n");
  };
  std::printf("\nratios\n");
  ratios("copy kernel alone", bounds.device_copy, "kernel / device copy");
  ratios("GPU to GPU, local", bounds.device_copy, "local / device copy");
  const double slower = std::min({bounds.to_device, bounds.to_host, bounds.tcp});
  ratios("GPU to GPU, tcp", slower, "tcp / slower bound");
  std::printf(
      "\nonce a stream may go on: %.1f us until a spinning thread sees its count, %.1f us until a\n"
      "write that waits for that count has its first bytes at the peer (medians)\n",
      reactions.spinner / 1e3, reactions.written / 1e3);
  std::printf("while new kernels were launched the engine thread answered within %.0f us\n",
              held_up / 1e3);
}

void print_json(const Bounds& bounds, const std::vector<Row>& rows, const Reactions& reactions,
                double held_up, const std::string& gpu) {
  std::printf("{\"gpu\": \"%s\", \"bytes\": %zu, \"device_copy\": %.6g, \"to_device\": %.6g, ",
              gpu.c_str(), kRequestBytes, bounds.device_copy, bounds.to_device);
  std::printf("\"to_host\": %.6g, \"tcp\": %.6g, ", bounds.to_host, bounds.tcp);
  std::printf("\"spinner_ns\": %.6g, \"written_ns\": %.6g, \"held_up_ns\": %.6g, \"rows\": [",
              reactions.spinner, reactions.written, held_up);
  for (std::size_t i = 0; i < rows.size(); ++i) {
    std::printf("%s{\"way\": \"%s\", \"page\": %zu, \"bytes_per_second\": %.6g}", i ? ", " : "",
                rows[i].name.c_str(), rows[i].page, rows[i].bandwidth);
  }
  std::printf("]}\n");
}

int run(bool json) {
  Receiver receiver;  // first: see its constructor
  use_gpu();
  cuda::Gpus gpus;
  const std::string gpu = good(gpus.open(0))->label();
  const auto say = [](const char* what) { std::fprintf(stderr, "bench-gpu: %s\n", what); };
  say("bandwidths of the hardware");
  const Bounds bounds = measure_bounds(receiver);
  say("writes that wait for a stream");
  const Reactions reactions = measure_reactions();
  say("delays of the engine thread");
  const double held_up = measure_held_up();
  std::vector<Row> rows;
  for (const std::size_t page : kPages) {
    rows.push_back({"copy kernel alone", page, measure_kernel(page)});
  }
  for (const Way& way : kWays) {
    say(way.name);
    measure(receiver, way, rows);
  }
  json ? print_json(bounds, rows, reactions, held_up, gpu)
       : print(bounds, rows, reactions, held_up, gpu);
  return 0;
}

}  // namespace
}  // namespace kvxfer::gpu_bench

int main(int count, char** arguments) {
  const std::string_view option = count > 1 ? arguments[1] : "";
  if (count > 2 || !(option.empty() || option == "--json")) {
    std::fprintf(stderr, "usage: kvxfer_gpu_bench [--json]\n");
    return 2;
  }
  return kvxfer::gpu_bench::run(option == "--json");
}
