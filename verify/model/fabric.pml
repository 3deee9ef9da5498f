/* The writes of a transfer, the permission to place them, and its revocation. */

/* Decode's end is closed. With tcp and local, decode's engine thread, which places the bytes, has
   stopped. With NICs, the queue pair is in ERR. */
#ifdef WITHOUT_FENCE
#define FENCED(t) (worker[DECODE_OF(t)].life == DEAD)
#else
#define FENCED(t) (CONNECTION(t).decode_lost)
#endif
#define LANDS(t) (!FENCED(t) && !x[t].cut)

/* Operation.cancel(): no further write is posted; posted writes are waited for. */
inline cancel_writes(t)
{
  if
  :: x[t].queued > 0 -> x[t].queued = 0; x[t].failed = 1
  :: else
  fi
}

/* Prefill's end of the connection has ended, and its operations with it. Writes on the wire may still
   land, unless decode has closed its end too. */
inline orphan_writes(t)
{
  if :: UNDER_WAY(t) > 0 -> x[t].failed = 1 :: else fi;
  if :: LANDS(t) -> x[t].orphaned = x[t].orphaned + x[t].posted :: else fi;
  x[t].queued = 0;
  x[t].posted = 0;
  x[t].landed = 0;
  x[t].refused = 0
}

inline drop_orphans(t)
{
  if :: !LANDS(t) -> x[t].orphaned = 0 :: else fi
}

/* A NIC places all bytes that its sender posts, even while decode's process is frozen. */
#ifdef NIC
#define PLACES(t) true
#define GRANTED(t) true
#else
#define PLACES(t) UP(DECODE_OF(t))
#ifdef WITHOUT_GRANTS
#define GRANTED(t) true
#else
#define GRANTED(t) (x[t].live)
#endif
#endif

/* The last write of a group has the immediate, and one queue pair keeps the order. Over two queue
   pairs the last write may land first. */
#ifndef GROUPED
#define COUNTS(t) true
#elif defined(SPLIT_GROUP)
#define COUNTS(t) (x[t].came == 1)
#else
#define COUNTS(t) (x[t].came == WRITES)
#endif

inline land(t)
{
  REQUIRE(invariant_1, owner[BLOCK_OF(t)] == t &&
          (block[BLOCK_OF(t)] == OFFERED || block[BLOCK_OF(t)] == RECEIVING));
#ifdef GROUPED
  x[t].came++;
#endif
  if :: x[t].live && COUNTS(t) -> x[t].count++ :: else fi
}

#ifdef GPU
/* A copy counts only when it has ended, and not if the peer was lost meanwhile. */
inline end_copy(t)
{
  x[t].copying--;
  REQUIRE(invariant_1, owner[BLOCK_OF(t)] == t &&
          (block[BLOCK_OF(t)] == OFFERED || block[BLOCK_OF(t)] == RECEIVING));
#ifndef WITHOUT_COPY_END
  if :: x[t].live && !FENCED(t) -> x[t].count++ :: else fi;
#endif
  if :: !FENCED(t) && !CONNECTION(t).prefill_lost -> x[t].landed++ :: else fi
}
#endif

inline free_block(t)
{
  block_becomes(BLOCK_OF(t), FREE);
  owner[BLOCK_OF(t)] = NOBODY;
#ifdef GROUPED
  x[t].came = 0;
#endif
  x[t].count = 0
}

/* counter.revoke(): after it no write with the counter's immediate lands. If NICs place the bytes, it
   needs an answer or a reset of the paths; if a GPU does, the end of its copies. */
inline revoke(t)
{
  if
  :: !x[t].live -> free_block(t)
  :: else ->
       x[t].live = 0;
#if defined(NIC) && !defined(WITHOUT_REVOKE)
       if
       :: CONNECTION(t).decode_lost -> free_block(t)
       :: else -> x[t].revoking = 1
       fi
#elif defined(GPU) && !defined(WITHOUT_COPY_WAIT)
       if
       :: x[t].copying == 0 -> free_block(t)
       :: else -> x[t].revoking = 1
       fi
#else
       free_block(t)
#endif
  fi
}

inline end_revocation(t)
{
  x[t].revoking = 0;
  free_block(t)
}
