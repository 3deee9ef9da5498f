// The suite that every fabric passes: the fabrics that a run covers, and the table of results.
//
// KVXFER_TEST_FABRICS  the fabrics, e.g. "verbs"; by default all that this host can run
// KVXFER_TEST_NICS     the number of NICs of each engine, if the fabric has NICs; 2 by default
#pragma once

#include <string>
#include <vector>

#include "kvxfer/types.hpp"

namespace kvxfer::test {

// All fabrics: tcp, local, simulated, mlx5 (verbs over simulated devices), verbs, ofi, ofi-strict
// (EFA's limits and disorder).
const std::vector<std::string>& all_fabrics();
// Says why this run does not cover the fabric; empty if it does.
std::string why_not(const std::string& fabric);
// True if the fabric's NIC places the bytes, not the receiving engine.
bool places_by_nic(const std::string& fabric);
unsigned nics_per_engine();

// The fabrics whose NICs are doubles that can hold writes back, which hold_nics() makes them do.
std::vector<std::string> held_fabrics();
void hold_nics(const std::string& fabric, const std::vector<NicInfo>& nics, bool held);

// Options of an engine that has only this fabric.
EngineOptions options_for(const std::string& fabric, const std::string& name);

// The fabrics to try the running case on: `for (const auto& fabric : EachFabric())`. Each is a
// cell of the table, which fails if an assertion does.
class EachFabric {
 public:
  EachFabric();

  class Iterator {
   public:
    Iterator(const std::vector<std::string>& fabrics, std::size_t at)
        : fabrics_(fabrics), at_(at) {}
    const std::string& operator*() const;
    Iterator& operator++();
    bool operator!=(const Iterator& other) const { return at_ != other.at_; }

   private:
    const std::vector<std::string>& fabrics_;
    std::size_t at_;
  };
  Iterator begin() const { return {fabrics_, 0}; }
  Iterator end() const { return {fabrics_, fabrics_.size()}; }

 private:
  std::vector<std::string> fabrics_;
};

}  // namespace kvxfer::test
