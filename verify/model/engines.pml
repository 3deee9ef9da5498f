/* The two engines of a transfer: its writes, and the connection that has its number. */

/* The connection has ended, or heartbeats are missing. The model has no real time; the engine's
   peer_timeout bounds the detection to less than a second. */
#ifdef WITHOUT_HEARTBEATS
#define GONE(c, w) (!connection[c].open)
#else
#define GONE(c, w) (!connection[c].open || worker[w].life == FROZEN)
#endif

#define OVER(t, c) (x[t].over == c)

#define PREFILL_RUNS(t) (x[t].over != NOBODY && UP(PREFILL_OF(t)) && !CONNECTION(t).prefill_lost)

proctype engines(byte n)
{
end:
  do
  :: d_step { x[n].queued > 0 && PREFILL_RUNS(n) -> x[n].queued--; x[n].posted++ }

#ifdef GPU
  :: d_step { x[n].posted > 0 && LANDS(n) && PLACES(n) && GRANTED(n) ->
       x[n].posted--;
       x[n].copying++;
#ifdef WITHOUT_COPY_END
       x[n].count++
#endif
     }
  :: d_step { x[n].copying > 0 && UP(DECODE_OF(n)) -> end_copy(n); retire(n) }
  :: d_step { x[n].revoking && x[n].copying == 0 && UP(DECODE_OF(n)) ->
       end_revocation(n);
       retire(n)
     }
#else
  :: d_step { x[n].posted > 0 && LANDS(n) && PLACES(n) && GRANTED(n) ->
       x[n].posted--;
       x[n].landed++;
       land(n)
     }
#endif
  :: d_step { x[n].posted > 0 && LANDS(n) && PLACES(n) && !GRANTED(n) ->
       x[n].posted--;
       x[n].refused++
     }
  :: d_step { x[n].orphaned > 0 && LANDS(n) && PLACES(n) ->
       x[n].orphaned--;
#ifdef GPU
       if :: GRANTED(n) -> x[n].copying++ :: else fi;
#else
       if :: GRANTED(n) -> land(n) :: else fi;
#endif
       retire(n)
     }

  :: d_step { x[n].landed > 0 && PREFILL_RUNS(n) -> x[n].landed-- }
  :: d_step { x[n].refused > 0 && PREFILL_RUNS(n) -> x[n].refused--; x[n].failed = 1 }

#ifdef NIC
  /* After the frame revoke, prefill posts no write. The frame revoked says that none is under way. */
  :: d_step { x[n].revoking && !x[n].revoked && PREFILL_RUNS(n) && CONNECTION(n).open ->
       x[n].revoked = 1;
       cancel_writes(n)
     }
  :: d_step { x[n].revoking && x[n].revoked && POSTED(n) == 0 &&
              PREFILL_RUNS(n) && CONNECTION(n).open && UP(DECODE_OF(n)) ->
       end_revocation(n);
       retire(n)
     }
  /* No answer in time: decode resets its paths, and prefill learns of it. */
  :: d_step { x[n].revoking && UP(DECODE_OF(n)) ->
#ifndef WITHOUT_RESET
       x[n].cut = 1;
       drop_orphans(n);
#endif
       end_revocation(n);
       retire(n)
     }
  :: d_step { x[n].cut && PREFILL_RUNS(n) && x[n].queued + x[n].posted > 0 ->
       x[n].queued = 0;
       x[n].posted = 0;
       x[n].failed = 1
     }
#endif

  /* DomainGroup::close_peer() at decode: the fence. After it a waiting owner may take memory back. */
  :: d_step { connection[n].used && UP(DECODE_OF(n)) && !connection[n].decode_lost &&
              GONE(n, PREFILL_OF(n)) ->
       connection[n].decode_lost = 1;
       connection[n].open = 0;
       for (i : 0 .. TRANSFERS - 1) {
         if
         :: OVER(i, n) ->
              drop_orphans(i);
              if :: x[i].revoking && COPYING(i) == 0 -> end_revocation(i) :: else fi;
              retire(i)
         :: else
         fi
       };
       skip
     }
  /* MessageHandler.drop() at decode */
  :: d_step { connection[n].used && UP(DECODE_OF(n)) && connection[n].decode_lost &&
              !connection[n].decode_told ->
       connection[n].decode_told = 1;
       for (i : 0 .. TRANSFERS - 1) {
         if
         :: OVER(i, n) ->
              forget(to_decode[i]);
              decode_gives_up(i, DE_PEER_LOST);
              retire(i)
         :: else
         fi
       };
       skip
     }

  /* Prefill loses decode: its operations end. */
  :: d_step { connection[n].used && UP(PREFILL_OF(n)) && !connection[n].prefill_lost &&
              GONE(n, DECODE_OF(n)) ->
       connection[n].prefill_lost = 1;
       connection[n].open = 0;
       for (i : 0 .. TRANSFERS - 1) {
         if :: OVER(i, n) -> orphan_writes(i); retire(i) :: else fi
       };
       skip
     }
  :: d_step { connection[n].used && UP(PREFILL_OF(n)) && connection[n].prefill_lost &&
              !connection[n].prefill_told ->
       connection[n].prefill_told = 1;
       for (i : 0 .. TRANSFERS - 1) {
         if
         :: PREFILL_OF(i) == PREFILL_OF(n) && DECODE_OF(i) == DECODE_OF(n) ->
              if :: OVER(i, n) -> forget(to_prefill[i]) :: else fi;
              prefill_loses_decode(i, n);
              retire(i)
         :: else
         fi
       };
       skip
     }
  od
}
