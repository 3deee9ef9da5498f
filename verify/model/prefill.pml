/* The prefill side of a transfer: PrefillSession, and the parts of MessageHandler and PrefillSide that
   serve it. */

#define PREFILL_HEARS(t, m) (x[t].over != NOBODY && UP(PREFILL_OF(t)) && \
                             !CONNECTION(t).prefill_told && to_prefill[t]?[m])

#ifdef WITHOUT_EPOCHS
#define TICKET_OF_PREFILL(t) true
#define TICKET_OF_DECODE_AT_PREFILL(t) true
#else
#define TICKET_OF_PREFILL(t) (x[t].ticket_prefill == worker[PREFILL_OF(t)].epoch)
#define TICKET_OF_DECODE_AT_PREFILL(t) (x[t].ticket_decode == CONNECTION(t).decode_epoch)
#endif

/* A message to a lost peer is dropped. */
inline tell_decode(t, m)
{
  if
  :: CONNECTION(t).open && !CONNECTION(t).prefill_lost -> assert(nfull(to_decode[t])); to_decode[t]!m
  :: else
  fi
}

/* PrefillSession._give_up() */
inline prefill_gives_up(t, e)
{
  prefill_look_up(t, e);
  if
  :: prefill_after != P_NONE && prefill_after != x[t].prefill ->
       x[t].prefill = prefill_after;
       cancel_writes(t)
  :: else
  fi
}

/* Outbound.add() and post(): writes of layers that the inference engine has computed. */
inline post_writes(t, n)
{
  if
  :: CONNECTION(t).prefill_lost || x[t].revoked || x[t].cut -> x[t].failed = 1
  :: else -> x[t].queued = x[t].queued + n
  fi
}

/* Outbound.announce(), once every layer is posted. */
inline announce(t)
{
  if
  :: CONNECTION(t).prefill_lost -> prefill_gives_up(t, PE_ABORT)
  :: else ->
       tell_decode(t, DONE);
       prefill_advance(t, PE_FINISH)
  fi
}

/* PrefillSession.accept() */
inline accept_offer(t)
{
  REQUIRE(invariant_5, CONNECTION(t).decode_epoch == x[t].ticket_decode);
  x[t].met = 1;
  prefill_advance(t, PE_OFFER);
  if
  :: CONNECTION(t).prefill_lost -> prefill_gives_up(t, PE_ABORT)
  :: else ->
       tell_decode(t, ACCEPTED);
       if :: x[t].written > 0 -> post_writes(t, x[t].written) :: else fi;
       if :: x[t].written == WRITES -> announce(t) :: else fi
  fi
}

/* Connections.loss_of_decode(): the loss of the connection over which decode's OFFER would arrive */
#ifdef WITHOUT_MEMORY
#define DECODE_WAS_LOST(t) false
#else
#define DECODE_WAS_LOST(t) (x[t].over != NOBODY && CONNECTION(t).prefill_told && \
                            CONNECTION(t).decode_epoch == x[t].ticket_decode)
#endif

#define CONNECTED(t, c) (connection[c].used && !connection[c].prefill_told && \
                         connection[c].decode_epoch == x[t].ticket_decode)

inline prefill_knows(t)
{
#ifdef WITHOUT_LEASES
  if
  :: PREFILL_ACTIVE(t) && x[t].over != NOBODY && CONNECTED(t, x[t].over) -> x[t].knew = 1
  :: else
  fi
#else
  skip
#endif
}

/* PrefillSide.request() */
inline prefill_begins(t)
{
  x[t].prefill_request = SERVED;
  if
  :: TICKET_OF_PREFILL(t) && x[t].prefill == P_NONE ->
       if
       :: x[t].failure
       :: !x[t].failure && !x[t].early && DECODE_WAS_LOST(t) -> x[t].failure = 1
       :: else ->
            REQUIRE(invariant_5, x[t].ticket_prefill == worker[PREFILL_OF(t)].epoch);
            x[t].prefill = P_WAITING;
            x[t].pinned = 1;
#ifdef WITHOUT_LEASES
            if
            :: x[t].over != NOBODY && CONNECTION(t).decode_epoch == x[t].ticket_decode -> x[t].knew = 1
            :: else
            fi;
#endif
            if :: x[t].early -> x[t].early = 0; accept_offer(t) :: else fi
       fi
  :: else
  fi
}

/* PrefillSide.offer() */
inline prefill_hears_offer(t)
{
  if
  :: !TICKET_OF_PREFILL(t) || !TICKET_OF_DECODE_AT_PREFILL(t) || x[t].claimed_offer ->
       tell_decode(t, REFUSED)
  :: else ->
       x[t].claimed_offer = 1;
       if
       :: x[t].failure || x[t].prefill == P_CANCELLING ->
            tell_decode(t, REFUSED);
            x[t].failure = 1
       :: !x[t].failure && x[t].prefill == P_WAITING -> accept_offer(t)
       :: !x[t].failure && x[t].prefill == P_NONE -> x[t].early = 1
       fi
  fi
}

/* PrefillSide.release() */
inline prefill_hears_release(t)
{
  if
  :: TICKET_OF_PREFILL(t) && TICKET_OF_DECODE_AT_PREFILL(t) && !x[t].claimed_offer ->
       x[t].claimed_offer = 1;
       if
       :: PREFILL_ACTIVE(t) -> prefill_gives_up(t, PE_ABORT)
       :: else -> x[t].failure = 1
       fi
  :: else
  fi
}

/* PrefillSide.cancel() */
inline prefill_hears_cancel(t)
{
  if
  :: PREFILL_ACTIVE(t) && x[t].met ->
       x[t].heard_cancel = 1;
       prefill_gives_up(t, PE_PEER_CANCEL)
  :: else ->
       if :: x[t].early -> x[t].early = 0; x[t].failure = 1 :: else fi;
       tell_decode(t, CANCELLED)
  fi
}

/* PrefillSide.drop(), for one transfer; `c` is the lost connection. */
inline prefill_loses_decode(t, c)
{
  if
  :: x[t].early && x[t].over == c -> x[t].early = 0; x[t].failure = 1
  :: else
  fi;
  if
  :: PREFILL_ACTIVE(t) && ((x[t].met && x[t].over == c) ||
     connection[c].decode_epoch == x[t].ticket_decode) ->
       prefill_gives_up(t, PE_PEER_LOST)
  :: else
  fi
}

/* The end of PrefillSession._settle() */
inline prefill_ends(t, e)
{
  prefill_advance(t, e);
  x[t].pinned = 0;
  if
  :: x[t].prefill == P_CANCELLED ->
       x[t].failure = 1;
#ifndef WITHOUT_LAST_WORDS
       if
       :: x[t].met && x[t].heard_cancel -> tell_decode(t, CANCELLED)
       :: x[t].met && !x[t].heard_cancel -> tell_decode(t, CANCEL)
       :: else
       fi
#endif
  :: else
  fi;
  x[t].written = 0;
  x[t].met = 0;
  x[t].knew = 0;
  x[t].heard_cancel = 0;
  x[t].failed = 0
}

/* PrefillSession._lease_over(), and PrefillSide._expired() */
inline prefill_lease_over(t)
{
  if
  :: x[t].early ->
       x[t].early = 0;
       x[t].failure = 1;
       tell_decode(t, REFUSED)
  :: else -> prefill_gives_up(t, PE_LEASE_OVER)
  fi
}

#ifdef WITHOUT_PINS
#define SETTLED(t) true
#else
#define SETTLED(t) (UNDER_WAY(t) == 0)
#endif

proctype prefill_session(byte t)
{
end:
  do
  :: d_step { x[t].prefill_request == SENT && UP(PREFILL_OF(t)) -> prefill_begins(t); retire(t) }

  /* write_layer(), and finish() after the last layer */
  :: d_step { UP(PREFILL_OF(t)) && x[t].written < WRITES &&
              (x[t].prefill == P_WAITING || x[t].prefill == P_SENDING) ->
       if
       :: x[t].prefill == P_SENDING -> post_writes(t, 1)
       :: else
       fi;
       x[t].written++;
       if
       :: x[t].prefill == P_SENDING && x[t].written == WRITES -> announce(t)
       :: else
       fi
     }

  :: d_step { PREFILL_HEARS(t, OFFER) -> to_prefill[t]?OFFER; prefill_hears_offer(t); retire(t) }
  :: d_step { PREFILL_HEARS(t, RELEASE) -> to_prefill[t]?RELEASE; prefill_hears_release(t); retire(t) }
  :: d_step { PREFILL_HEARS(t, KEEP) -> to_prefill[t]?KEEP;
       if :: x[t].prefill == P_WAITING -> x[t].met = 1 :: else fi; retire(t) }
  :: d_step { PREFILL_HEARS(t, CANCEL) -> to_prefill[t]?CANCEL; prefill_hears_cancel(t); retire(t) }

  /* _settle() */
  :: d_step { UP(PREFILL_OF(t)) && x[t].prefill == P_DRAINING && x[t].failed ->
       prefill_gives_up(t, PE_ABORT) }
  :: d_step { UP(PREFILL_OF(t)) && x[t].prefill == P_DRAINING && SETTLED(t) && !x[t].failed ->
       REQUIRE(invariant_1, UNDER_WAY(t) == 0);
       prefill_ends(t, PE_DELIVERED); retire(t) }
  :: d_step { UP(PREFILL_OF(t)) && x[t].prefill == P_CANCELLING && SETTLED(t) ->
       REQUIRE(invariant_1, UNDER_WAY(t) == 0);
       prefill_ends(t, PE_DRAINED); retire(t) }

#ifdef LEASES_END
  /* A lease ends at the latest when no other step is possible. */
  :: atomic { timeout && PREFILL_LEASE(t) -> d_step { prefill_lease_over(t); retire(t) } }
#endif
  od
}
