-- ARGV: [4] id of the transfer, [5] its block table as msgpack. The log says only that there is one:
-- it is as large as the prompt is long, and one replica asks for it.
local id, packed = ARGV[4], ARGV[5]

if redis.call('HEXISTS', TRANSFERS, id) == 0 then
  return {'unknown-transfer'}
end
local there = redis.call('HGET', TABLES, id)
if there then
  return {there == packed and 'ok' or 'table-exists'}
end
redis.call('HSET', TABLES, id, packed)
append('kind', 'table', 'transfer', id)
return {'ok'}
