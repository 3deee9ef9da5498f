#include "fabric/verbs/address_lookups.hpp"

#include <utility>

namespace kvxfer::verbs {

std::future<int> AddressLookups::run(std::function<int()> lookup) {
  std::erase_if(lookups_, [](const Lookup& one) { return one.ended->load(); });
  std::promise<int> promise;
  std::future<int> result = promise.get_future();
  auto ended = std::make_shared<std::atomic<bool>>(false);
  ++*running_;
  std::jthread thread([lookup = std::move(lookup), promise = std::move(promise), ended,
                       running = running_]() mutable {
    const int answer = lookup();
    lookup = nullptr;
    --*running;
    promise.set_value(answer);
    ended->store(true);
  });
  lookups_.push_back({std::move(ended), std::move(thread)});
  return result;
}

}  // namespace kvxfer::verbs
