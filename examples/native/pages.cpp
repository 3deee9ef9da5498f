// Two engines without threads: pages of one land in the memory of the other, whose counter says
// when all are there. Nothing here sleeps: to wait is to poll.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <kvxfer/engine.hpp>
#include <vector>

namespace {

template <class T>
T good(kvxfer::Result<T> result) {
  if (result) return std::move(*result);
  std::fprintf(stderr, "%s\n", result.error().text.c_str());
  std::exit(1);
}

std::unique_ptr<kvxfer::TransferEngine> make_engine(const char* name) {
  kvxfer::EngineOptions options;
  options.cluster_key = "a secret of the whole cluster";
  options.name = name;
  options.thread = false;
  return good(kvxfer::TransferEngine::create(options));
}

}  // namespace

int main() {
  using Kind = kvxfer::Completion::Kind;
  constexpr std::size_t kPage = 4096;
  const auto writer = make_engine("writer");
  const auto reader = make_engine("reader");
  // Polls both until the writer has a completion of this kind; errors end the program.
  const auto await = [&](Kind kind) {
    while (true) {
      writer->poll();
      reader->poll();
      for (kvxfer::Completion& each : writer->drain()) {
        if (each.code != kvxfer::Errc::ok) {
          std::fprintf(stderr, "%s\n", each.text.c_str());
          std::exit(1);
        }
        if (each.kind == kind) return each;
      }
    }
  };

  // Between processes the address, the descriptor and the immediate may travel by any channel.
  writer->connect(reader->address(), std::chrono::seconds(2));
  const kvxfer::PeerId peer = await(Kind::connect).peer;
  const auto source = good(writer->allocate(8 * kPage));
  const auto destination = good(reader->allocate(8 * kPage));
  const kvxfer::Imm imm = good(reader->allocate_counter());
  for (std::size_t i = 0; i < 8 * kPage; ++i) kvxfer::bytes_of(source)[i] = std::byte(i / kPage);

  const std::vector<std::int64_t> from{0, 2, 4, 6};
  const std::vector<std::int64_t> to{7, 5, 3, 1};
  const auto submitted = good(writer->write_pages(peer, source, kvxfer::descriptor_of(destination),
                                                  {.page_length = kPage,
                                                   .source_pages = from,
                                                   .destination_pages = to,
                                                   .source_stride = kPage,
                                                   .destination_stride = kPage},
                                                  {.imm = imm}));
  while (reader->counter_value(imm) < submitted.immediates) {
    writer->poll();
    reader->poll();
  }
  for (std::size_t i = 0; i < from.size(); ++i) {
    const auto at = static_cast<std::size_t>(to[i]) * kPage;
    const auto wrote = static_cast<std::size_t>(from[i]) * kPage;
    if (std::memcmp(&kvxfer::bytes_of(destination)[at], &kvxfer::bytes_of(source)[wrote], kPage)) {
      std::fprintf(stderr, "page %zu is not there\n", i);
      return 1;
    }
  }
  std::printf("%zu pages, %llu writes\n", from.size(),
              static_cast<unsigned long long>(submitted.writes));
}
