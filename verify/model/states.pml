/* The states of sessions and blocks, the messages, and every allowed transition: the tables of
   kvxfer/kv/session_state.py, kvxfer/kv/block_pool.py and kvxfer/kv/messages.py. A test compares
   them with the code (test_model_states.py). NONE: there is no session. */

mtype:prefill = { P_NONE, P_WAITING, P_SENDING, P_DRAINING, P_CANCELLING, P_DELIVERED, P_CANCELLED };
mtype:decode = { D_NONE, D_OFFERED, D_RECEIVING, D_COUNTING, D_COMPLETE, D_TAKEN, D_CANCELLING,
                 D_CANCELLED, D_FAILED };
mtype:prefill_event = { PE_OFFER, PE_FINISH, PE_DELIVERED, PE_ABORT, PE_LEASE_OVER, PE_PEER_CANCEL,
                        PE_PEER_LOST, PE_DRAINED };
mtype:decode_event = { DE_ACCEPTED, DE_REFUSED, DE_DONE, DE_COUNTED, DE_TAKE, DE_ABORT,
                       DE_LEASE_OVER, DE_PEER_CANCEL, DE_PEER_CANCELLED, DE_PEER_LOST };
mtype:block = { FREE, OFFERED, RECEIVING, COMPLETE, HELD };

/* HELLO is a flag of the connection. EXPECT belongs to the brokered handshake, which is not modelled. */
mtype:message = { OFFER, RELEASE, KEEP, ACCEPTED, REFUSED, DONE, CANCEL, CANCELLED };

/* The results of looking up a transition. They are no part of a state. */
hidden mtype:prefill prefill_after;
hidden mtype:decode decode_after;
hidden byte block_allowed;

#define PREFILL(from, event, to) :: x[t].prefill == P_##from && e == PE_##event -> prefill_after = P_##to
#define DECODE(from, event, to) :: x[t].decode == D_##from && e == DE_##event -> decode_after = D_##to
#define BLOCK(from, to) :: block[b] == from && (after) == to -> block_allowed = true

/* Sets prefill_after: P_NONE if the state does not allow the event. */
inline prefill_look_up(t, e)
{
  if
  PREFILL(WAITING, OFFER, SENDING)
  PREFILL(WAITING, ABORT, CANCELLING)
  PREFILL(WAITING, LEASE_OVER, CANCELLING)
  PREFILL(WAITING, PEER_CANCEL, CANCELLING)
  PREFILL(WAITING, PEER_LOST, CANCELLING)
  PREFILL(SENDING, FINISH, DRAINING)
  PREFILL(SENDING, ABORT, CANCELLING)
  PREFILL(SENDING, LEASE_OVER, CANCELLING)
  PREFILL(SENDING, PEER_CANCEL, CANCELLING)
  PREFILL(SENDING, PEER_LOST, CANCELLING)
  PREFILL(DRAINING, DELIVERED, DELIVERED)
  PREFILL(DRAINING, ABORT, CANCELLING)
  PREFILL(DRAINING, LEASE_OVER, CANCELLING)
  PREFILL(DRAINING, PEER_CANCEL, CANCELLING)
  PREFILL(DRAINING, PEER_LOST, CANCELLING)
  PREFILL(CANCELLING, ABORT, CANCELLING)
  PREFILL(CANCELLING, LEASE_OVER, CANCELLING)
  PREFILL(CANCELLING, PEER_CANCEL, CANCELLING)
  PREFILL(CANCELLING, PEER_LOST, CANCELLING)
  PREFILL(CANCELLING, DRAINED, CANCELLED)
  :: else -> prefill_after = P_NONE
  fi
}

/* Sets decode_after: D_NONE if the state does not allow the event. */
inline decode_look_up(t, e)
{
  if
  DECODE(OFFERED, ACCEPTED, RECEIVING)
  DECODE(OFFERED, REFUSED, FAILED)
  DECODE(OFFERED, ABORT, CANCELLING)
  DECODE(OFFERED, LEASE_OVER, CANCELLING)
  DECODE(OFFERED, PEER_CANCEL, FAILED)
  DECODE(OFFERED, PEER_LOST, FAILED)
  DECODE(RECEIVING, DONE, COUNTING)
  DECODE(RECEIVING, ABORT, CANCELLING)
  DECODE(RECEIVING, LEASE_OVER, CANCELLING)
  DECODE(RECEIVING, PEER_CANCEL, FAILED)
  DECODE(RECEIVING, PEER_LOST, FAILED)
  DECODE(COUNTING, COUNTED, COMPLETE)
  DECODE(COUNTING, ABORT, CANCELLING)
  DECODE(COUNTING, LEASE_OVER, CANCELLING)
  DECODE(COUNTING, PEER_CANCEL, FAILED)
  DECODE(COUNTING, PEER_LOST, FAILED)
  DECODE(COMPLETE, TAKE, TAKEN)
  DECODE(COMPLETE, ABORT, CANCELLED)
  DECODE(COMPLETE, LEASE_OVER, CANCELLED)
  DECODE(COMPLETE, PEER_CANCEL, COMPLETE)
  DECODE(COMPLETE, PEER_LOST, COMPLETE)
  DECODE(CANCELLING, ACCEPTED, CANCELLING)
  DECODE(CANCELLING, DONE, CANCELLING)
  DECODE(CANCELLING, REFUSED, CANCELLED)
  DECODE(CANCELLING, PEER_CANCEL, CANCELLED)
  DECODE(CANCELLING, PEER_CANCELLED, CANCELLED)
  DECODE(CANCELLING, PEER_LOST, CANCELLED)
  DECODE(CANCELLING, ABORT, CANCELLING)
  DECODE(CANCELLING, LEASE_OVER, CANCELLED)
  :: else -> decode_after = D_NONE
  fi
}

inline block_becomes(b, after)
{
  block_allowed = false;
  if
  BLOCK(FREE, OFFERED)
  BLOCK(FREE, HELD)
  BLOCK(OFFERED, RECEIVING)
  BLOCK(OFFERED, FREE)
  BLOCK(RECEIVING, COMPLETE)
  BLOCK(RECEIVING, FREE)
  BLOCK(COMPLETE, HELD)
  BLOCK(COMPLETE, FREE)
  BLOCK(HELD, FREE)
  :: else
  fi;
  assert(block_allowed);
  block[b] = after
}

/* Applies an event that the state has to allow. Any other event violates the protocol: the code then
   disconnects the peer. */
inline prefill_advance(t, e)
{
  prefill_look_up(t, e);
  assert(prefill_after != P_NONE);
  x[t].prefill = prefill_after
}

inline decode_advance(t, e)
{
  decode_look_up(t, e);
  assert(decode_after != D_NONE);
  x[t].decode = decode_after
}
