-- ARGV: [5] the update as the caller read it, empty if it is new, [6] the update now, [7] the
-- update after its lease ends, empty if it has ended, [8] lease in microseconds, [9] how many
-- updates that have ended are kept. Writes the update only if it still is as it was read.
local was, packed, lapsed, lease = ARGV[5], ARGV[6], ARGV[7], tonumber(ARGV[8])

local update = cmsgpack.unpack(packed)
if ran_out('w', update.update_id) then
  lapse(update.update_id)
end
if (redis.call('HGET', UPDATES, update.update_id) or '') ~= was then
  return {'ok', 'changed'}
end
if was == '' and redis.call('HEXISTS', UPDATING, update.model) == 1 then
  return {'ok', 'changed'}
end
put_update(packed, lapsed, lease)
while redis.call('ZCARD', ENDED) > tonumber(ARGV[9]) do
  drop_update(redis.call('ZPOPMIN', ENDED)[1])
end
return {'ok', 'taken'}
