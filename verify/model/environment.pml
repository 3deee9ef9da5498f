/* The control plane, which issues tickets and requests, and all faults. */

/* Issues a ticket, which names the epochs of its workers, and sends the requests that carry it. */
#define CONTROL_PLANE(t) \
  :: d_step { x[t].prefill_request == NOT_SENT -> \
       x[t].ticket_prefill = worker[PREFILL_OF(t)].epoch; \
       x[t].ticket_decode = worker[DECODE_OF(t)].epoch; \
       x[t].prefill_request = SENT; \
       x[t].decode_request = SENT }

inline prefill_worker_dies(w)
{
  for (i : 0 .. TRANSFERS - 1) {
    if
    :: PREFILL_OF(i) == w ->
         if
         :: x[i].over != NOBODY ->
              orphan_writes(i);
              CONNECTION(i).open = 0;
              CONNECTION(i).prefill_lost = 1;
              CONNECTION(i).prefill_told = 1
         :: else
         fi;
         forget(to_prefill[i]);
         x[i].prefill = P_NONE;
         x[i].claimed_offer = 0;
         x[i].failure = 0;
         x[i].early = 0;
         x[i].pinned = 0;
         x[i].met = 0;
         x[i].knew = 0;
         x[i].heard_cancel = 0;
         x[i].written = 0;
         x[i].failed = 0;
         retire(i)
    :: else
    fi
  };
  skip
}

inline decode_worker_dies(w)
{
  for (i : 0 .. TRANSFERS - 1) {
    if
    :: DECODE_OF(i) == w ->
         if
         :: x[i].over != NOBODY ->
              CONNECTION(i).open = 0;
              CONNECTION(i).decode_lost = 1;
              CONNECTION(i).decode_told = 1;
         :: else
         fi;
         forget(to_decode[i]);
         if
         :: owner[BLOCK_OF(i)] == i -> owner[BLOCK_OF(i)] = NOBODY; block[BLOCK_OF(i)] = FREE
         :: else
         fi;
         x[i].decode = D_NONE;
         x[i].lease = 0;
         x[i].live = 0;
         x[i].count = 0;
#ifdef GROUPED
         x[i].came = 0;
#endif
         x[i].revoking = 0;
#ifdef GPU
         x[i].copying = 0; /* the process's memory has ended with it */
#endif
         x[i].slot = 0;
         if :: x[i].decode_request == KEPT -> x[i].decode_request = SERVED :: else fi;
         retire(i)
    :: else
    fi
  };
  skip
}

inline dies(w)
{
  worker[w].life = DEAD;
  if
  :: w < PREFILLS -> prefill_worker_dies(w)
  :: else -> decode_worker_dies(w)
  fi
}

/* Each strike costs one of `faults`. Two transfers are alike, so the first strike never hits the
   second one or the worker that only it uses. */
inline strike()
{
  faults--;
  unhurt = 0
}

/* A worker dies and starts again, or is frozen, for a while or for ever. */
#define STRIKES_WORKER(w, may) \
  :: d_step { faults > 0 && (may) && worker[w].life != DEAD -> strike(); dies(w) } \
  :: d_step { faults > 0 && (may) && UP(w) -> strike(); worker[w].life = FROZEN } \
  :: d_step { faults > 0 && (may) && UP(w) -> strike(); worker[w].life = FROZEN; worker[w].thaws = 1 } \
  :: d_step { worker[w].life == DEAD -> worker[w].life = LIVES; worker[w].epoch++ } \
  :: d_step { worker[w].life == FROZEN && worker[w].thaws -> \
       worker[w].thaws = 0; worker[w].life = LIVES }

/* A connection breaks; a session is given up; a request is lost, comes again, or ends before it has
   blocks. */
#define STRIKES_TRANSFER(t, may) \
  :: d_step { faults > 0 && (may) && connection[t].open -> strike(); connection[t].open = 0 } \
  :: d_step { faults > 0 && (may) && UP(PREFILL_OF(t)) && PREFILL_ACTIVE(t) && \
              x[t].prefill != P_CANCELLING -> \
       strike(); prefill_gives_up(t, PE_ABORT) } \
  :: d_step { faults > 0 && (may) && UP(DECODE_OF(t)) && DECODE_ACTIVE(t) && \
              x[t].decode != D_CANCELLING -> \
       strike(); decode_gives_up(t, DE_ABORT); retire(t) } \
  :: d_step { faults > 0 && (may) && x[t].prefill_request == SENT -> \
       strike(); x[t].prefill_request = SERVED; retire(t) } \
  :: d_step { faults > 0 && (may) && x[t].prefill_request == SERVED -> \
       strike(); x[t].prefill_request = SENT } \
  :: d_step { faults > 0 && (may) && x[t].decode_request == SERVED -> \
       strike(); x[t].decode_request = SENT } \
  :: d_step { faults > 0 && (may) && (x[t].decode_request == SENT || x[t].decode_request == KEPT) -> \
       strike(); decode_releases(t); retire(t) }

/* A lease ends while other steps are still possible. */
#ifndef LEASES_END
#define STRIKES_LEASES(t, may)
#else
#define STRIKES_LEASES(t, may) \
  :: d_step { faults > 0 && (may) && PREFILL_LEASE(t) -> strike(); prefill_lease_over(t); retire(t) } \
  :: d_step { faults > 0 && (may) && DECODE_LEASE(t) -> strike(); decode_lease_over(t); retire(t) }
#endif

#if TRANSFERS == 2
#define NOT_FIRST !unhurt
#else
#define NOT_FIRST true
#endif

proctype environment()
{
end:
  do
  CONTROL_PLANE(0)
  STRIKES_TRANSFER(0, true)
  STRIKES_LEASES(0, true)
#if TRANSFERS > 1
  CONTROL_PLANE(1)
  STRIKES_TRANSFER(1, NOT_FIRST)
  STRIKES_LEASES(1, NOT_FIRST)
#endif
#if TRANSFERS > 2
  CONTROL_PLANE(2)
  STRIKES_TRANSFER(2, true)
  STRIKES_LEASES(2, true)
#endif
#if TOPOLOGY == SHARED_DECODE
  STRIKES_WORKER(0, true)
  STRIKES_WORKER(1, NOT_FIRST)
  STRIKES_WORKER(2, true)
#elif TOPOLOGY == SHARED_PREFILL
  STRIKES_WORKER(0, true)
  STRIKES_WORKER(1, true)
  STRIKES_WORKER(2, NOT_FIRST)
#else
  STRIKES_WORKER(0, true)
  STRIKES_WORKER(1, true)
#endif
  od
}
