-- ARGV: [5] id, [6] state, [7] incarnation, [8] blocks, [9] HTTP address, [10] role, [11] spec as
-- JSON, [12] zone or empty, [13] secret or empty. Returns the lease, or the holder of the id.
local id, state, incarnation, zone = ARGV[5], ARGV[6], ARGV[7], ARGV[12]

local holder = member_of(id)
if holder then
  if incarnation == '' or incarnation ~= holder.incarnation then
    local remaining = redis.call('ZSCORE', EXPIRIES, 'i' .. id) - now
    return {'held', holder.http_address, int(holder.epoch), int(remaining)}
  end
  remove(id, 'deregistered')
end

redis.call('HSET', SPECS, id, ARGV[11])
if zone ~= '' then
  redis.call('HSET', ZONES, id, zone)
end
local member = {
  epoch = math.max(sequence + 1, now), -- the id that `change` gives to the record
  state = state,
  role = ARGV[10],
  incarnation = incarnation,
  secret = ARGV[13],
  http_address = ARGV[9],
  num_blocks = tonumber(ARGV[8]),
  registered_at = now / 1000000,
  heartbeat_at = now / 1000000,
  reserved = {transfers = 0, blocks = 0},
}
save(id, member)
-- A replica of an older version removes the earlier registration but leaves its blocks.
redis.call('HDEL', BLOCKS, unpack(parts_of(id)))
redis.call('ZADD', EXPIRIES, int(now + LEASE), 'i' .. id)
redis.call('HINCRBY', COUNTS, 'registrations', 1)
change('registered', id, member)
return lease_of(member)
