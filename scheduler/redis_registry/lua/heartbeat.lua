-- ARGV: [4] id, [5] epoch, [6] state or empty, [7] msgpack of the load or empty, [8] lease in
-- microseconds, [9] msgpack of what it sends to whom or empty. Returns the lease.
--
-- What it sends goes into no record: it is as long as the fleet is large, and only an overview
-- asks for it.
local id, epoch, wanted, load, lease = ARGV[4], ARGV[5], ARGV[6], ARGV[7], tonumber(ARGV[8])
local sent = ARGV[9]

local member = member_of(id)
if not member or int(member.epoch) ~= epoch then
  return {'stale', id, epoch, member and int(member.epoch) or ''}
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
local moved = wanted ~= '' and ORDER[wanted] > ORDER[member.state]
if moved then
  member.state = wanted
end
save(id, member)
redis.call('ZADD', EXPIRIES, int(now + lease), 'i' .. id)
if moved then
  change('state-changed', id, member)
else
  append('kind', 'beat', 'instance', id, 'epoch', epoch,
    'heartbeat_at', string.format('%.6f', member.heartbeat_at), 'load', load)
end
return lease_of(member)
