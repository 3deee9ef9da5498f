/* The conditions at the end of every run, and the same conditions as formulas. A run ends when no
   process can take a step. A separate check shows that every run ends: there are no cycles. */

#define DECODE_OVER(t) ((x[t].decode != D_NONE && !DECODE_ACTIVE(t)) || \
                        GONE_FOR(DECODE_OF(t), x[t].ticket_decode))
#define PREFILL_OVER(t) ((x[t].prefill != P_NONE && !PREFILL_ACTIVE(t)) || \
                         GONE_FOR(PREFILL_OF(t), x[t].ticket_prefill))

/* A frozen worker cannot give back its pages. */
#define HAS_PAGES(t) ((UP(PREFILL_OF(t)) && (x[t].pinned || x[t].early)) || \
                      (UP(DECODE_OF(t)) && owner[BLOCK_OF(t)] == t))
#define PREFILL_WAITS(t) (UP(PREFILL_OF(t)) && PREFILL_ACTIVE(t) && x[t].knew && DECODE_OVER(t))
#define DECODE_WAITS(t) (UP(DECODE_OF(t)) && DECODE_ACTIVE(t) && PREFILL_OVER(t))

#ifndef LEASES_END
#define LEASES_RUN false
#elif TRANSFERS == 1
#define LEASES_RUN (PREFILL_LEASE(0) || DECODE_LEASE(0))
#elif TRANSFERS == 2
#define LEASES_RUN (PREFILL_LEASE(0) || DECODE_LEASE(0) || PREFILL_LEASE(1) || DECODE_LEASE(1))
#else
#define LEASES_RUN (PREFILL_LEASE(0) || DECODE_LEASE(0) || PREFILL_LEASE(1) || DECODE_LEASE(1) || \
                    PREFILL_LEASE(2) || DECODE_LEASE(2))
#endif

#ifdef WITHOUT_LEASES
#define LEFT(t) (HAS_PAGES(t) && !PREFILL_ACTIVE(t) && !DECODE_ACTIVE(t) && !x[t].early)
#else
#define LEFT(t) HAS_PAGES(t)
#endif

#ifndef FORMULAS
active proctype at_the_end()
{
  timeout && !LEASES_RUN ->
    d_step {
      for (i : 0 .. TRANSFERS - 1) {
        REQUIRE(invariant_2, !LEFT(i));
#ifdef WITHOUT_LEASES
        REQUIRE(invariant_4, !PREFILL_WAITS(i));
        REQUIRE(invariant_4, !DECODE_WAITS(i));
#endif
      };
      skip
    }
}
#else
#define RETURNS(t) ([] (HAS_PAGES(t) -> <> !HAS_PAGES(t)))
#define LEARNS(t) ([] (PREFILL_WAITS(t) -> <> !PREFILL_WAITS(t)) && \
                   [] (DECODE_WAITS(t) -> <> !DECODE_WAITS(t)))
ltl pages_return { RETURNS(0) }
ltl peers_learn { LEARNS(0) }
#endif
