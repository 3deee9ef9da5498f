-- ARGV: [5] id, [6] epoch, [7] state or empty, [8] msgpack of the load or empty, [9] msgpack of its
-- traffic or empty, [10] secret. Returns the lease.
--
-- The traffic goes into no record: it grows with the fleet, and only an overview asks for it.
local id, epoch, wanted, load, sent = ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9]

local member, refused = living(id, epoch, ARGV[10])
if refused then
  return refused
end
member.heartbeat_at = now / 1000000
if load ~= '' then
  member.load = cmsgpack.unpack(load)
  member.started = 0
  if sent == '' then
    redis.call('HDEL', SENT, id)
  else
    redis.call('HSET', SENT, id, sent)
  end
end
if wanted == 'draining' then
  member.leaving = true
end
local moved = wanted ~= '' and ORDER[wanted] > ORDER[member.state]
if moved then
  member.state = wanted
end
save(id, member)
redis.call('ZADD', EXPIRIES, int(now + LEASE), 'i' .. id)
if moved then
  change('state-changed', id, member)
else
  append('kind', 'beat', 'instance', id, 'epoch', epoch,
    'heartbeat_at', string.format('%.6f', member.heartbeat_at), 'load', load)
end
return lease_of(member)
