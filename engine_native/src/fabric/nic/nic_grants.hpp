// The grants of this engine to one peer, and the memory windows that open them on its paths. Engine
// thread only.
#pragma once

#include <cstdint>
#include <span>
#include <unordered_map>
#include <vector>

#include "fabric/nic/nic_path.hpp"
#include "fabric/nic/remote_region.hpp"
#include "memory_region.hpp"
#include "thread_owner.hpp"

namespace kvxfer {

class NicLinkOwner;

class NicGrants {
 public:
  explicit NicGrants(NicLinkOwner& owner) : owner_(owner) {}

  // Sends a grant to the peer, the first time or again, and opens windows on these paths. `keys`
  // are for NICs without windows.
  void add(const RegionPtr& grant, RemoteRegion keys, std::span<NicPath* const> paths);
  void open_on(NicPath& path);
  void on_window(const NicPath& path, std::uint64_t key);
  // Closes grants; the peer writes to them no more.
  void close(std::span<const RegionPtr> grants, std::span<NicPath* const> paths);

 private:
  struct Open {
    RegionPtr grant;
    RemoteRegion keys;  // sent to the peer
  };

  void expect_no_window(std::uint64_t key, Open& open);
  void send_window(const NicPath& path, std::uint64_t key);

  [[no_unique_address]] ThreadOwner thread_;
  NicLinkOwner& owner_;
  std::unordered_map<std::uint64_t, Open> open_;
};

// Sends a region in the form that RemoteRegions reads.
void send_region(NicLinkOwner& owner, std::uint64_t key, Errc status, const RemoteRegion& region);

}  // namespace kvxfer
