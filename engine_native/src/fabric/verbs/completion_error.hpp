// What a failed work completion means, in words.
#pragma once

#include <infiniband/verbs.h>

#include <string>

#include "fabric/verbs/verbs_library.hpp"

namespace kvxfer::verbs {

// "its NIC does not answer …"; to be read after the name of the peer.
std::string cause_of(const ibv_wc& completion, const VerbsLibrary& library);

}  // namespace kvxfer::verbs
