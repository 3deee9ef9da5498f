-- ARGV: [5] id, [6] epoch, [7] 1 where all that was there before goes, [8] hashes that come, [9]
-- that go, eight bytes each, none twice, [10] how many are kept, [11] secret. Returns how many there
-- are.
local id, epoch, reset, added, removed = ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local SIZE = 8

local _, refused = living(id, epoch, ARGV[11])
if refused then
  return refused
end

local function without(packed, hash)
  local at = packed:find(hash, 1, true)
  while at do
    if at % SIZE == 1 then
      return packed:sub(1, at - 1) .. packed:sub(at + SIZE)
    end
    at = packed:find(hash, at + 1, true)
  end
  return packed
end

local packed = reset ~= '1' and redis.call('HGET', BLOCKS, id) or ''
for _, gone in ipairs({removed, added}) do
  for at = 1, #gone, SIZE do
    packed = without(packed, gone:sub(at, at + SIZE - 1))
  end
end
packed = (packed .. added):sub(-SIZE * tonumber(ARGV[10]))
if packed == '' then
  redis.call('HDEL', BLOCKS, id)
else
  redis.call('HSET', BLOCKS, id, packed)
end
append('kind', 'blocks', 'instance', id, 'added', added, 'removed', removed, 'reset', reset)
return {'ok', int(#packed / SIZE)}
