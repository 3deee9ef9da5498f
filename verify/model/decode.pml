/* The decode side of a transfer: DecodeSession with its one Inbound, and KvEndpoint for it. */

#define DECODE_HEARS(t, m) (x[t].over != NOBODY && UP(DECODE_OF(t)) && \
                            !CONNECTION(t).decode_told && to_decode[t]?[m])

#ifdef WITHOUT_EPOCHS
#define TICKET_OF_DECODE(t) true
#define TICKET_OF_PREFILL_AT_DECODE(t) true
#else
#define TICKET_OF_DECODE(t) (x[t].ticket_decode == worker[DECODE_OF(t)].epoch)
#define TICKET_OF_PREFILL_AT_DECODE(t) (x[t].ticket_prefill == CONNECTION(t).prefill_epoch)
#endif

inline tell_prefill(t, m)
{
  if
  :: CONNECTION(t).open && !CONNECTION(t).decode_lost -> assert(nfull(to_prefill[t])); to_prefill[t]!m
  :: else
  fi
}

/* DecodeSession.give_up() */
inline decode_gives_up(t, e)
{
  decode_look_up(t, e);
  if
  :: decode_after != D_NONE && decode_after != x[t].decode && x[t].decode != D_CANCELLING ->
       x[t].decode = decode_after;
       if :: decode_after == D_CANCELLING -> tell_prefill(t, CANCEL) :: else fi;
       revoke(t)
  :: decode_after != D_NONE && (decode_after == x[t].decode || x[t].decode == D_CANCELLING) ->
       x[t].decode = decode_after
  :: else
  fi;
  if :: !DECODE_ACTIVE(t) -> x[t].lease = 0 :: else fi
}

/* Finds decode's open connection to prefill, or makes a new one. An engine's id is part of its
   address, so a restarted engine does not answer. */
inline meet_prefill(t)
{
  if
  :: x[t].over == NOBODY ->
       for (i : 0 .. TRANSFERS - 1) {
         if
         :: i != t && x[i].over == i && PREFILL_OF(i) == PREFILL_OF(t) &&
            DECODE_OF(i) == DECODE_OF(t) && !connection[i].decode_lost -> x[t].over = i; prefill_knows(t)
         :: else
         fi
       };
       if
       :: x[t].over == NOBODY && UP(PREFILL_OF(t)) &&
          x[t].ticket_prefill == worker[PREFILL_OF(t)].epoch ->
            assert(!connection[t].used);
            x[t].over = t;
            connection[t].used = 1;
            connection[t].open = 1;
            connection[t].prefill_epoch = worker[PREFILL_OF(t)].epoch;
            connection[t].decode_epoch = worker[DECODE_OF(t)].epoch;
            prefill_knows(t)
       :: else
       fi
  :: else
  fi
}

/* KvEndpoint._begin() and DecodeSession.offer() */
inline decode_begins(t)
{
  x[t].decode_request = SERVED;
  REQUIRE(invariant_5, x[t].ticket_decode == worker[DECODE_OF(t)].epoch &&
                       x[t].ticket_prefill == CONNECTION(t).prefill_epoch);
  x[t].slot = 0;
  do
  :: block[BLOCK_OF(t)] != FREE -> x[t].slot++
  :: else -> break
  od;
  block_becomes(BLOCK_OF(t), OFFERED);
  owner[BLOCK_OF(t)] = t;
  x[t].live = 1;
  x[t].lease = 1;
  x[t].decode = D_OFFERED;
  if
  :: CONNECTION(t).decode_lost -> decode_gives_up(t, DE_ABORT)
  :: else -> tell_prefill(t, OFFER)
  fi
}

#define WELCOME(t) (x[t].over != NOBODY && TICKET_OF_PREFILL_AT_DECODE(t) && \
                    !CONNECTION(t).decode_told && x[t].decode == D_NONE)

/* KvEndpoint.release(): the request ends before it has blocks. Prefill is told if it is reachable. */
inline decode_releases(t)
{
  x[t].decode_request = SERVED;
  if
  :: UP(DECODE_OF(t)) && TICKET_OF_DECODE(t) ->
       meet_prefill(t);
       if
       :: WELCOME(t) -> tell_prefill(t, RELEASE)
       :: else
       fi
  :: else
  fi
}

#if SLOTS == 1
#define ROOM(t) (block[(DECODE_OF(t) - PREFILLS) * SLOTS] == FREE)
#else
#define ROOM(t) (block[(DECODE_OF(t) - PREFILLS) * SLOTS] == FREE || \
                 block[(DECODE_OF(t) - PREFILLS) * SLOTS + 1] == FREE)
#endif

/* A lease ends only once. */
inline decode_lease_over(t)
{
  x[t].lease = 0;
  decode_gives_up(t, DE_LEASE_OVER)
}

proctype decode_session(byte t)
{
end:
  do
  /* KvEndpoint.decode_session(), release() and keep() */
  :: atomic { (x[t].decode_request == SENT || x[t].decode_request == KEPT) && UP(DECODE_OF(t)) &&
              ROOM(t) ->
       if
       :: TICKET_OF_DECODE(t) ->
            d_step { meet_prefill(t) };
            if
            :: WELCOME(t) -> d_step { decode_begins(t) }
            :: else -> d_step { x[t].decode_request = SERVED; retire(t) }
            fi
       :: else -> d_step { x[t].decode_request = SERVED; retire(t) }
       fi
     }
#ifdef WITH_KEEP
  :: atomic { x[t].decode_request == SENT && UP(DECODE_OF(t)) && TICKET_OF_DECODE(t) ->
       d_step { meet_prefill(t) };
       if
       :: WELCOME(t) -> tell_prefill(t, KEEP); x[t].decode_request = KEPT
       :: else -> x[t].decode_request = SERVED
       fi
     }
#endif

  /* Messages of an ended transfer have no effect. Prefill ignores the CANCELLED that answers a late
     CANCEL. */
  :: d_step { DECODE_HEARS(t, ACCEPTED) -> to_decode[t]?ACCEPTED;
       if
       :: DECODE_ACTIVE(t) ->
            decode_advance(t, DE_ACCEPTED);
            if
            :: x[t].decode == D_RECEIVING -> block_becomes(BLOCK_OF(t), RECEIVING)
            :: else
            fi
       :: else -> retire(t)
       fi
     }
  :: d_step { DECODE_HEARS(t, DONE) -> to_decode[t]?DONE;
       if
       :: DECODE_ACTIVE(t) -> decode_advance(t, DE_DONE)
       :: else -> retire(t)
       fi
     }
  :: d_step { DECODE_HEARS(t, REFUSED) -> to_decode[t]?REFUSED; decode_gives_up(t, DE_REFUSED); retire(t) }
  :: d_step { DECODE_HEARS(t, CANCEL) -> to_decode[t]?CANCEL; decode_gives_up(t, DE_PEER_CANCEL); retire(t) }
  :: d_step { DECODE_HEARS(t, CANCELLED) -> to_decode[t]?CANCELLED;
       decode_gives_up(t, DE_PEER_CANCELLED); retire(t) }

  /* Inbound._complete() */
  :: d_step { UP(DECODE_OF(t)) && x[t].decode == D_COUNTING &&
#ifndef WITHOUT_TOTAL
              x[t].count == TOTAL &&
#endif
              true ->
       x[t].live = 0;
       decode_advance(t, DE_COUNTED);
       block_becomes(BLOCK_OF(t), COMPLETE)
     }
  /* take(); later decode's inference engine frees the block. */
  :: d_step { UP(DECODE_OF(t)) && x[t].decode == D_COMPLETE ->
       REQUIRE(invariant_3, owner[BLOCK_OF(t)] == t && PLACED(t) == WRITES);
       block_becomes(BLOCK_OF(t), HELD);
       decode_advance(t, DE_TAKE);
       x[t].lease = 0
     }
  :: d_step { UP(DECODE_OF(t)) && x[t].decode == D_TAKEN && owner[BLOCK_OF(t)] == t -> free_block(t); retire(t) }

#ifdef LEASES_END
  :: atomic { timeout && DECODE_LEASE(t) -> d_step { decode_lease_over(t); retire(t) } }
#endif
  od
}
