/* KV transfers between prefill and decode workers, as in docs/protocol.md, which says under "Model"
   what is checked and what is left out. `make model` runs it.

   Set with -D:
     TRANSFERS       the number of transfers, each with its ticket
     TOPOLOGY        the workers that they connect, below
     SLOTS           blocks of a decode worker; a transfer takes one, and writes its two halves
     NIC             the NIC places the bytes (verbs, ofi); without it, the receiving engine does
     GPU             decode's blocks are on a GPU; the receiving engine starts its copies
     FAULTS          the number of times that the environment may strike
     WITHOUT_LEASES  no lease ever ends: a side learns of the other's end from the peer alone
     WITH_KEEP       decode may send KEEP before it offers
     FORMULAS        check the formulas in properties.pml in place of the end of each run
   Other switches remove a defence (WITHOUT_FENCE and more); Spin then has to find a violation. */

#define SHARED_DECODE 1  /* two pairs: a prefill worker each, one decode worker, one pool of blocks */
#define SHARED_PREFILL 2 /* two pairs: one prefill worker, a decode worker each */
#define ONE_PAIR 3       /* all transfers over the connections of one pair */

#if TOPOLOGY == SHARED_DECODE
#define PREFILLS 2
#define DECODES 1
#define PREFILL_OF(t) ((t) % PREFILLS)
#define DECODE_OF(t) PREFILLS
#elif TOPOLOGY == SHARED_PREFILL
#define PREFILLS 1
#define DECODES 2
#define PREFILL_OF(t) 0
#define DECODE_OF(t) (PREFILLS + (t) % DECODES)
#else
#define PREFILLS 1
#define DECODES 1
#define PREFILL_OF(t) 0
#define DECODE_OF(t) 1
#endif

#define WORKERS (PREFILLS + DECODES)
#define WRITES 2
#ifdef GROUPED /* one immediate counts for both writes */
#define TOTAL 1
#define PLACED(t) x[t].came
#else
#define TOTAL WRITES
#define PLACED(t) x[t].count
#endif
#define NOBODY 15

#if !defined(WITHOUT_LEASES) && !defined(WITH_ENDLESS_LEASES)
#define LEASES_END
#endif

#include "states.pml"

/* The invariants of docs/protocol.md, by number. The one that a run violates is false. */
hidden byte invariant_1 = true; /* no byte lands in a page after it was returned to its pool */
hidden byte invariant_2 = true; /* every page taken is returned, on every path */
hidden byte invariant_3 = true; /* decode never starts on an incomplete cache */
hidden byte invariant_4 = true; /* each side learns of the other's abort, crash or restart */
hidden byte invariant_5 = true; /* a restarted peer is never taken for the old one */

#define REQUIRE(invariant, condition) invariant = (condition); assert(invariant)

/* A process with its engine. A frozen one does nothing, but its NIC keeps working. */
mtype:life = { LIVES, FROZEN, DEAD };
typedef Worker {
  mtype:life life = LIVES;
  bit thaws;
  unsigned epoch : 2;
};
Worker worker[WORKERS];
#define UP(w) (worker[w].life == LIVES)

/* One connection between two engines. `lost`: this side's engine has closed its end, which is the
   fence. `told`: its endpoint knows. */
typedef Connection {
  bit used;
  bit open;
  bit prefill_lost;
  bit prefill_told;
  bit decode_lost;
  bit decode_told;
  unsigned prefill_epoch : 2; /* epochs of the processes that it connects */
  unsigned decode_epoch : 2;
};
Connection connection[TRANSFERS];

mtype:request = { NOT_SENT, SENT, KEPT, SERVED };

typedef Transfer {
  /* The control plane's part */
  unsigned ticket_prefill : 2; /* epochs */
  unsigned ticket_decode : 2;
  mtype:request prefill_request = NOT_SENT;
  mtype:request decode_request = NOT_SENT;
  /* The number of the connection that it uses (NOBODY: none yet) */
  unsigned over : 4 = NOBODY;

  /* Prefill's endpoint: ledger, early offer, session */
  bit claimed_offer;
  bit failure;          /* the transfer's failure is remembered */
  bit early;            /* an OFFER waits for its request */
  mtype:prefill prefill = P_NONE;
  bit pinned;           /* prefill's blocks are pinned */
  bit met;              /* decode's OFFER, or its KEEP, has arrived */
  bit heard_cancel;     /* decode's CANCEL has arrived */
  unsigned written : 2; /* layers that the engine has computed */
  bit revoked;          /* prefill's NIC posts nothing more with this immediate */

  /* Writes. They are alike, and land in any order. */
  unsigned queued : 2;   /* submitted, not posted to a path yet */
  unsigned posted : 2;
#ifdef GPU
  unsigned copying : 2;  /* copied by decode's GPU, which nothing stops */
#endif
  unsigned landed : 2;   /* placed; the sender does not know yet */
  unsigned refused : 2;  /* not placed; the sender does not know yet */
  unsigned orphaned : 2; /* their sender has ended, or has given up the connection */
  bit failed;            /* one was refused, or cancelled before it was posted */

  /* Decode's endpoint: session, counter, block */
  mtype:decode decode = D_NONE;
  bit lease;          /* the lease runs */
  unsigned slot : 2;
  bit live;           /* the counter and its grants are valid */
  unsigned count : 2; /* immediates that arrived */
#ifdef GROUPED
  unsigned came : 2;  /* writes that arrived */
#endif
  bit revoking;       /* prefill's NIC was asked to stop */
  bit cut;            /* it did not in time: the path was reset */

  bit knew;           /* prefill's session has been connected to decode; for invariant 4 alone */
};
Transfer x[TRANSFERS];

mtype:block block[DECODES * SLOTS] = FREE;
byte owner[DECODES * SLOTS] = NOBODY; /* the number of the transfer */
#define BLOCK_OF(t) ((DECODE_OF(t) - PREFILLS) * SLOTS + x[t].slot)

/* Messages in order, on the wire or still in the engine's queue. */
chan to_prefill[TRANSFERS] = [6] of { mtype:message };
chan to_decode[TRANSFERS] = [6] of { mtype:message };

byte faults; /* strikes that are left */
bit unhurt = 1;

/* A loop variable. */
hidden byte i;

/* True while a lease runs: that of prefill's session or early offer, and that of decode's session. */
#define PREFILL_LEASE(t) (UP(PREFILL_OF(t)) && (x[t].early || x[t].prefill == P_WAITING || \
                          x[t].prefill == P_SENDING || x[t].prefill == P_DRAINING))
#define DECODE_LEASE(t) (UP(DECODE_OF(t)) && x[t].lease)

#define CONNECTION(t) connection[x[t].over]
#define PREFILL_ACTIVE(t) (x[t].prefill != P_NONE && x[t].prefill != P_DELIVERED && x[t].prefill != P_CANCELLED)
#define DECODE_ACTIVE(t) (x[t].decode != D_NONE && x[t].decode != D_TAKEN && x[t].decode != D_CANCELLED && x[t].decode != D_FAILED)

inline forget(messages)
{
  do
  :: nempty(messages) -> messages?_
  :: empty(messages) -> break
  od
}

#ifdef GPU
#define COPYING(t) x[t].copying
#else
#define COPYING(t) 0
#endif
/* Prefill waits for copies until it gives the connection up. */
#define AWAITED(t) ((COPYING(t) > 0 && !CONNECTION(t).prefill_lost) -> COPYING(t) : 0)
#define UNDER_WAY(t) (x[t].queued + x[t].posted + AWAITED(t) + x[t].landed + x[t].refused)
#define POSTED(t) (x[t].posted + x[t].landed + x[t].refused)

/* The process that a ticket names has ended. */
#define GONE_FOR(w, ticket) (worker[w].life == DEAD || worker[w].epoch != (ticket))

/* Merges all states of a transfer that has ended everywhere and whose ticket has no further use: their
   differences have no effect. */
inline retire(t)
{
  if
  :: x[t].over != NOBODY && !PREFILL_ACTIVE(t) && !DECODE_ACTIVE(t) && !x[t].early && !x[t].revoking &&
     x[t].prefill_request == SERVED && x[t].decode_request == SERVED &&
     (x[t].prefill != P_NONE || x[t].failure || GONE_FOR(PREFILL_OF(t), x[t].ticket_prefill)) &&
     (x[t].decode != D_NONE || GONE_FOR(DECODE_OF(t), x[t].ticket_decode)) &&
     owner[BLOCK_OF(t)] != t && UNDER_WAY(t) + x[t].orphaned + COPYING(t) == 0 &&
     len(to_prefill[t]) + len(to_decode[t]) == 0 ->
       x[t].prefill = P_CANCELLED;
       x[t].decode = D_CANCELLED;
       x[t].claimed_offer = 1;
       x[t].failure = 1;
       x[t].revoked = 0;
       x[t].cut = 0;
       x[t].lease = 0;
       x[t].slot = 0;
#if TOPOLOGY != ONE_PAIR && TRANSFERS == 2 /* no other transfer has its connection */
       CONNECTION(t).open = 0;
       CONNECTION(t).prefill_lost = 1;
       CONNECTION(t).prefill_told = 1;
       CONNECTION(t).decode_lost = 1;
       CONNECTION(t).decode_told = 1
#endif
  :: else
  fi
}

#include "fabric.pml"
#include "prefill.pml"
#include "decode.pml"
#include "engines.pml"
#include "environment.pml"
#include "properties.pml"

init {
  atomic {
    select(i : 0 .. FAULTS);
    faults = i;
    for (i : 0 .. TRANSFERS - 1) {
      run prefill_session(i);
      run decode_session(i);
      run engines(i)
    };
    run environment()
  }
}
