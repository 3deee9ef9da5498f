#include "fabric/verbs/completion_error.hpp"

#include "fabric/verbs/receive_queue.hpp"

namespace kvxfer::verbs {

std::string cause_of(const ibv_wc& completion, const VerbsLibrary& library) {
  if (completion.wr_id == kReceiveId && completion.status == IBV_WC_REM_ACCESS_ERR) {
    return "this NIC refused a write of its (remote access error): the memory region was "
           "deregistered here, or the key is wrong";
  }
  switch (completion.status) {
    case IBV_WC_RETRY_EXC_ERR:
      return "its NIC does not answer (transport retries exceeded): the process or host is gone, "
             "or the network between the NICs is broken";
    case IBV_WC_RNR_RETRY_EXC_ERR:
      return "its NIC had no receive ready for an immediate (receiver-not-ready retries exceeded)";
    case IBV_WC_REM_ACCESS_ERR:
      return "its NIC refused a write (remote access error): the memory region was deregistered "
             "there, or the key is wrong";
    case IBV_WC_REM_INV_REQ_ERR:
      return "its NIC found a write invalid (remote invalid request)";
    case IBV_WC_REM_OP_ERR:
      return "its NIC could not carry a write out (remote operation error)";
    case IBV_WC_LOC_PROT_ERR:
    case IBV_WC_LOC_ACCESS_ERR:
      return "this NIC may not read the source (local protection error): its memory was unmapped "
             "while it was registered";
    case IBV_WC_WR_FLUSH_ERR:
      return "the queue pair failed (work request flushed)";
    default:
      return std::string("work completion error: ") + library.wc_status_str(completion.status);
  }
}

}  // namespace kvxfer::verbs
