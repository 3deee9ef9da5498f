-- ARGV: [5] transfer as msgpack, [6] microseconds until it expires, [7] the replica that asks.
-- Returns the transfer that is already open under this id, or nothing.
local transfer, lasts = cmsgpack.unpack(ARGV[5]), tonumber(ARGV[6])
local id, sides = transfer.transfer_id, sides_of(transfer)

local open = transfer_of(id)
if open then -- asked again, as the answer was lost
  if redis.call('HGET', ASKED, id) ~= ARGV[7] then
    redis.call('HSET', ASKED, id, '')
  end
  return {'ok', open}
end
for _, side in ipairs(sides) do
  local name, epoch = side.party.instance_id, int(side.party.epoch)
  local member = member_of(name)
  if not member or int(member.epoch) ~= epoch then
    return {'stale', name, epoch, member and int(member.epoch) or ''}
  end
  if member.state ~= 'ready' then
    return {'not-ready', name, member.state}
  end
  if backlog and side.blocks > member.num_blocks - member.reserved.blocks then
    for _, held in ipairs(redis.call('SMEMBERS', HELD .. name)) do
      transfer_of(held) -- ends it if it has expired
    end
    member = member_of(name)
  end
  local unreserved = member.num_blocks - member.reserved.blocks
  if side.blocks > unreserved then
    return {'too-few-blocks', name, int(unreserved), int(side.blocks)}
  end
end
for _, side in ipairs(sides) do
  local name = side.party.instance_id
  local member = member_of(name)
  member.reserved.transfers = member.reserved.transfers + 1
  member.reserved.blocks = member.reserved.blocks + side.blocks
  save(name, member)
  redis.call('SADD', HELD .. name, id)
end
redis.call('HSET', TRANSFERS, id, ARGV[5])
redis.call('HSET', ASKED, id, ARGV[7])
redis.call('ZADD', EXPIRIES, int(now + lasts), 't' .. id)
redis.call('HINCRBY', COUNTS, 'transfers_opened', 1)
append('kind', 'open', 'transfer', ARGV[5])
return {'ok'}
