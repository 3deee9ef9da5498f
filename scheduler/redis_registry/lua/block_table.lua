-- ARGV: [5] id of the transfer, [6] its block table as msgpack. The log only says that there is a
-- table: it grows with the prompt, and only one replica asks for it.
local id, packed = ARGV[5], ARGV[6]

if not transfer_of(id) then
  return {'unknown-transfer'}
end
local there = redis.call('HGET', TABLES, id)
if there then
  return {there == packed and 'ok' or 'table-exists'}
end
redis.call('HSET', TABLES, id, packed)
append('kind', 'table', 'transfer', id)
return {'ok'}
