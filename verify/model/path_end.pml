/* The end of a path between two NICs, as docs/protocol.md describes it under "A lost path". There is
   one writer, one reader and one counter. Paths keep no order; each is opened when the one before it
   has ended at both sides. Completions of either side arrive in any order. Completions that a host
   has not read when its NIC is stopped are lost.

   Set with -D:
     WRITES   the number of writes, each with an immediate
     FAULTS   the number of times that a side may end the path
   Each of these removes a defence; Spin then has to find a violation:
     WITHOUT_STOP      no path_stop: each side stops its NIC at once
     WITHOUT_SEAL      the writer accepts completions after its path_stop
     WITHOUT_COUNTING  the reader stops its NIC before it has counted the writes that the writer knows
     EARLY_CLOSE       the reader sends path_close before its NIC is stopped
     WITHOUT_COUNTS    the writer posts unfinished writes again, whatever path_close says
     WITHOUT_ORDER     writes posted again without immediate need not be delivered first */

/* The invariants of docs/protocol.md. The one that a run violates is false. */
hidden byte invariant_1 = true; /* no write lands once a side has said that its NIC is stopped */
hidden byte invariant_3 = true; /* the count never exceeds the number of placed writes */
hidden byte invariant_6 = true; /* a lost path costs no peer, and every immediate counts once */

#define REQUIRE(invariant, condition) invariant = (condition); assert(invariant)

/* The writes. WANTED: to be posted with the immediate. AGAIN: to be posted without it, as it was
   counted before. */
mtype:write = { WANTED, AGAIN, POSTED, POSTED_AGAIN, DONE };
mtype:write write[WRITES] = WANTED;
bit placed[WRITES]; /* its bytes have arrived */

/* The state of the current path. A completion is queued by the NIC, and read by its host. */
mtype:completion = { NONE, QUEUED, READ };
bit counts[WRITES]; /* it carries the immediate */
bit landed[WRITES];
mtype:completion sent[WRITES] = NONE;    /* at the writer */
mtype:completion arrived[WRITES] = NONE; /* at the reader */

mtype:side = { OPEN, STOPPING, STOPPED };
mtype:side writer = OPEN;
mtype:side reader = OPEN;
bit reader_said_closed;

byte known;    /* immediates of this path that the writer knows to be delivered */
byte received; /* immediates of this path that the reader has counted */
byte needed;   /* the number that the writer's path_stop announced */
byte count;    /* the counter's value */
bit writer_heard_stop, reader_heard_stop;

mtype:message = { STOP, CLOSE };
chan to_reader = [2] of { mtype:message, byte };
chan to_writer = [2] of { mtype:message, byte };

byte faults = FAULTS;
hidden byte i, unknown, came;

#ifdef WITHOUT_STOP
#define writer_stops() writer = STOPPING; writer_heard_stop = 1
#define reader_stops() reader = STOPPING; reader_heard_stop = 1
#else
#define writer_stops() writer = STOPPING; to_reader!STOP(known)
#define reader_stops() reader = STOPPING; to_writer!STOP(0)
#endif

#ifdef WITHOUT_SEAL
#define BELIEVES (writer != STOPPED)
#else
#define BELIEVES (writer == OPEN)
#endif

#ifdef WITHOUT_COUNTING
#define COUNTED true
#else
#define COUNTED (received >= needed)
#endif

#ifdef WITHOUT_ORDER
#define FIRST(w) true
#else
#define IS_AGAIN(w) (write[w] == AGAIN || write[w] == POSTED_AGAIN)
#if WRITES == 2
#define FIRST(w) (!IS_AGAIN(0) && !IS_AGAIN(1))
#else
#define FIRST(w) (!IS_AGAIN(0) && !IS_AGAIN(1) && !IS_AGAIN(2))
#endif
#endif

/* LostWrites::give_back(): some of the unfinished writes with an immediate have arrived; it is unknown
   which. */
inline give_back(of_reader)
{
  REQUIRE(invariant_6, of_reader >= known);
  unknown = 0;
  for (i : 0 .. WRITES - 1) {
    if :: write[i] == POSTED -> unknown++ :: else fi
  };
#ifdef WITHOUT_COUNTS
  came = 0;
#else
  came = of_reader - known;
#endif
  if :: came > unknown -> came = unknown :: else fi;
  for (i : 0 .. WRITES - 1) {
    if
    :: write[i] == POSTED && came == unknown -> write[i] = DONE
    :: write[i] == POSTED && came < unknown && came > 0 -> write[i] = AGAIN; came--; unknown--
    :: write[i] == POSTED && came < unknown && came == 0 -> write[i] = WANTED
    :: write[i] == POSTED_AGAIN -> write[i] = AGAIN
    :: else
    fi
  }
}

inline open_path()
{
  for (i : 0 .. WRITES - 1) {
    counts[i] = 0;
    landed[i] = 0;
    sent[i] = NONE;
    arrived[i] = NONE
  };
  writer = OPEN;
  reader = OPEN;
  reader_said_closed = 0;
  known = 0;
  received = 0;
  needed = 0;
  writer_heard_stop = 0;
  reader_heard_stop = 0
}

/* The NICs. Writes on the wire land even when the sender's NIC is stopped. */
proctype nics(byte w)
{
end:
  do
  :: d_step { (write[w] == POSTED || write[w] == POSTED_AGAIN) && !landed[w] && reader != STOPPED ->
       REQUIRE(invariant_1, !reader_said_closed);
       landed[w] = 1;
       placed[w] = 1
     }
  :: d_step { landed[w] && sent[w] == NONE && writer != STOPPED -> sent[w] = QUEUED }
  :: d_step { landed[w] && counts[w] && arrived[w] == NONE && reader != STOPPED ->
       arrived[w] = QUEUED
     }
  od
}

proctype writing_host(byte w)
{
end:
  do
  :: d_step { writer == OPEN && write[w] == AGAIN -> write[w] = POSTED_AGAIN }
  :: d_step { writer == OPEN && write[w] == WANTED && FIRST(w) ->
       write[w] = POSTED;
       counts[w] = 1
     }
  :: d_step { sent[w] == QUEUED && BELIEVES ->
       sent[w] = READ;
       if :: counts[w] -> known++ :: else fi;
       write[w] = DONE
     }
  od
}

proctype reading_host(byte w)
{
end:
  do
  :: d_step { arrived[w] == QUEUED && reader != STOPPED ->
       arrived[w] = READ;
       received++;
       count++;
       REQUIRE(invariant_6, count <= WRITES);
       unknown = 0;
       for (i : 0 .. WRITES - 1) { unknown = unknown + placed[i] };
       REQUIRE(invariant_3, count <= unknown);
       unknown = 0
     }
  od
}

proctype path()
{
end:
  do
  /* A side loses the path, or resets it. */
  :: d_step { faults > 0 && writer == OPEN && reader == OPEN -> faults--; writer_stops() }
  :: d_step { faults > 0 && writer == OPEN && reader == OPEN -> faults--; reader_stops() }

  /* path_stop */
  :: d_step { to_writer?[STOP, _] -> to_writer?STOP, _;
       writer_heard_stop = 1;
       if :: writer == OPEN -> writer_stops() :: else fi
     }
  :: d_step { to_reader?[STOP, _] -> to_reader?STOP, needed;
       reader_heard_stop = 1;
       if :: reader == OPEN -> reader_stops() :: else fi
     }

  /* Each side stops its NIC, and sends path_close. */
  :: d_step { writer == STOPPING && writer_heard_stop ->
       writer = STOPPED;
       to_reader!CLOSE(0)
     }
#ifdef EARLY_CLOSE
  :: d_step { reader == STOPPING && !reader_said_closed && reader_heard_stop && COUNTED ->
       reader_said_closed = 1;
       to_writer!CLOSE(received)
     }
  :: d_step { reader == STOPPING && reader_said_closed -> reader = STOPPED }
#else
  :: d_step { reader == STOPPING && reader_heard_stop && COUNTED ->
       reader = STOPPED;
       reader_said_closed = 1;
       to_writer!CLOSE(received)
     }
#endif

  /* path_close */
#ifdef WITHOUT_STOP
  :: d_step { to_reader?[CLOSE, _] && reader == OPEN -> reader_stops() }
  :: d_step { to_writer?[CLOSE, _] && writer == OPEN -> writer_stops() }
#endif
  :: d_step { to_writer?[CLOSE, _] && to_reader?[CLOSE, _] && writer == STOPPED &&
              reader == STOPPED ->
       to_reader?CLOSE, _;
       to_writer?CLOSE, came;
       give_back(came);
       open_path();
       came = 0;
       unknown = 0
     }
  od
}

/* At the end of a run every write has been delivered and counted. */
active proctype at_the_end()
{
  timeout ->
    d_step {
      REQUIRE(invariant_6, count == WRITES && writer == OPEN && reader == OPEN);
      for (i : 0 .. WRITES - 1) { REQUIRE(invariant_6, write[i] == DONE) };
      skip
    }
}

init {
  atomic {
    for (i : 0 .. WRITES - 1) {
      run nics(i);
      run writing_host(i);
      run reading_host(i)
    };
    run path()
  }
}
