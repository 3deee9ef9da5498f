-- ARGV: [4] the update as the caller read it, empty where it is new, [5] the update now, [6] what it
-- becomes when its lease ends, empty where it has ended, [7] lease in microseconds, [8] how many
-- that have ended are kept. Takes it only where it still is as it was read.
local was, packed, lapsed, lease = ARGV[4], ARGV[5], ARGV[6], tonumber(ARGV[7])

local update = cmsgpack.unpack(packed)
if (redis.call('HGET', UPDATES, update.update_id) or '') ~= was then
  return {'ok', 'changed'}
end
if was == '' and redis.call('HEXISTS', UPDATING, update.model) == 1 then
  return {'ok', 'changed'}
end
put_update(packed, lapsed, lease)
while redis.call('ZCARD', ENDED) > tonumber(ARGV[8]) do
  drop_update(redis.call('ZPOPMIN', ENDED)[1])
end
return {'ok', 'taken'}
