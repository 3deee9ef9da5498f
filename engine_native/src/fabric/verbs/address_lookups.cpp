#include "fabric/verbs/address_lookups.hpp"

#include <utility>

namespace kvxfer::verbs {

std::future<int> AddressLookups::run(std::function<int()> lookup) {
  std::promise<int> promise;
  std::future<int> result = promise.get_future();
  auto ended = std::make_shared<std::atomic<bool>>(false);
  std::jthread thread([lookup = std::move(lookup), promise = std::move(promise), ended]() mutable {
    const int answer = lookup();
    lookup = nullptr;
    promise.set_value(answer);
    ended->store(true);
  });
  running_.push_back({std::move(ended), std::move(thread)});
  return result;
}

bool AddressLookups::pending() {
  std::erase_if(running_, [](const Lookup& one) { return one.ended->load(); });
  return !running_.empty();
}

}  // namespace kvxfer::verbs
