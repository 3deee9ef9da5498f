-- ARGV: [5] id, [6] epoch, [7] 1 to first remove all earlier hashes, [8] hashes to add, [9] hashes
-- to remove, six bytes each, [10] the most hashes that are kept, [11] secret. Returns the number of
-- hashes.
local id, epoch, reset, added, removed = ARGV[5], ARGV[6], ARGV[7], ARGV[8], ARGV[9]
local SIZE = 6

local _, refused = living(id, epoch, ARGV[11])
if refused then
  return refused
end

-- The first byte of a hash says which of the 16 parts it is in; the part has the rest.
local function by_part(packed)
  local parts = {}
  for at = 1, #packed, SIZE do
    local part = packed:byte(at)
    parts[part] = parts[part] or {}
    table.insert(parts[part], packed:sub(at + 1, at + SIZE - 1))
  end
  return parts
end

local function place(packed, hash)
  local at = packed:find(hash, 1, true)
  while at and at % (SIZE - 1) ~= 1 do
    at = packed:find(hash, at + 1, true)
  end
  return at
end

local function publish(before)
  local come, go = by_part(added), by_part(before and removed or '')
  local bytes = 0
  for part, field in ipairs(parts_of(id)) do
    local coming, going = come[part - 1], go[part - 1]
    if before and not coming and not going then
      bytes = bytes + redis.call('HSTRLEN', BLOCKS, field)
    else
      local packed = before and redis.call('HGET', BLOCKS, field) or ''
      for _, hash in ipairs(going or {}) do
        local at = place(packed, hash)
        if at then
          packed = packed:sub(1, at - 1) .. packed:sub(at + SIZE - 1)
        end
      end
      local new, seen = {packed}, {}
      for _, hash in ipairs(coming or {}) do
        if not seen[hash] and not place(packed, hash) then
          seen[hash] = true
          table.insert(new, hash)
        end
      end
      packed = table.concat(new)
      bytes = bytes + #packed
      if packed == '' then
        redis.call('HDEL', BLOCKS, field)
      else
        redis.call('HSET', BLOCKS, field, packed)
      end
    end
  end
  return bytes / (SIZE - 1)
end

local held = publish(reset ~= '1')
if held > tonumber(ARGV[10]) then
  held = publish(false)
end
-- A replica of an older version reads added, removed and reset, with eight bytes for each hash.
append('kind', 'blocks', 'instance', id, 'added', '', 'removed', '', 'reset', '', 'come', added,
       'go', removed, 'anew', reset)
return {'ok', int(held)}
