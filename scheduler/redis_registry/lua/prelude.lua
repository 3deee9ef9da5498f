-- The code that all steps share; it is put before each of the other scripts.
--
-- KEYS[1] is the prefix of every key: one hash tag, one pattern of an ACL. ARGV: [1] the time in
-- microseconds, empty for the time of this server, [2] how many bytes of the log are kept, [3] how
-- many changes, [4] the lease in microseconds; a step's own arguments follow.
--
-- instances   hash     id -> msgpack of the member: epoch, state, role, incarnation, secret
--                      (SHA-256), load, reserved, times
-- specs       hash     id -> the spec that the worker registered, as JSON
-- blocks      hash     id and : and a hexadecimal digit -> the hashes of the blocks it has cached
--                      that begin with this digit of 11: the other ten digits of each, five bytes
-- sent        hash     id -> msgpack of its traffic, if it sends any
-- transfers   hash     id -> msgpack of the transfer
-- asked       hash     id of a transfer -> the replica that was asked for it, empty for several
-- tables      hash     id of a transfer -> msgpack of its block table
-- held:ID     set      the transfers of one instance
-- updates     hash     id -> msgpack of the weight update
-- lapses      hash     id of an update under way -> msgpack of what it becomes when its lease ends
-- updating    hash     model -> id of its update under way
-- ended       sorted   ids of updates that have ended, by the time
-- expiries    sorted   'i' and an instance's id, 't' and a transfer's, or 'w' and a weight
--                      update's, by the time it expires
-- counts      hash     what happened since the registry began
-- zones       hash     id -> its zone, if it has one
-- seen        string   the time of the last step, within 0.1 s
-- unwell      string   the time of the step that ended a silence, until leases are spared for it
-- sequence    string   the id of the log's last record
-- changed     string   the id of the last change
-- log         stream   every step, for the replicas; a record names the one before it
-- parts       list     the last record of each full part of the log, a sixteenth of its bytes
-- part        string   the bytes of the part that is being written
-- changes     stream   the records of the log that watchers hear of
--
-- A key with a TTL would vanish without a record in the log. So leases are deadlines, and the next
-- calls end expired leases, a portion each. All times are this server's: replicas need no common
-- clock.

local PREFIX = KEYS[1]
local INSTANCES, SPECS = PREFIX .. 'instances', PREFIX .. 'specs'
local BLOCKS, SENT = PREFIX .. 'blocks', PREFIX .. 'sent'
local TRANSFERS, HELD = PREFIX .. 'transfers', PREFIX .. 'held:'
local TABLES, ASKED = PREFIX .. 'tables', PREFIX .. 'asked'
local UPDATES, LAPSES = PREFIX .. 'updates', PREFIX .. 'lapses'
local UPDATING, ENDED = PREFIX .. 'updating', PREFIX .. 'ended'
local EXPIRIES, COUNTS = PREFIX .. 'expiries', PREFIX .. 'counts'
local SEQUENCE, CHANGED = PREFIX .. 'sequence', PREFIX .. 'changed'
local SEEN, UNWELL, ZONES = PREFIX .. 'seen', PREFIX .. 'unwell', PREFIX .. 'zones'
local LOG, CHANGES = PREFIX .. 'log', PREFIX .. 'changes'
local PARTS, PART = PREFIX .. 'parts', PREFIX .. 'part'
local LOG_BYTES, CHANGES_LENGTH = tonumber(ARGV[2]), ARGV[3]
local PART_BYTES = LOG_BYTES / 16
local LEASE = tonumber(ARGV[4])
local SILENCE = 1000000 -- every replica takes a step twice a second
local PORTION = 100 -- removals by one step
local MASS = 10 -- fewer late leases than these are not spared
local ORDER = {joining = 1, ready = 2, draining = 3}

local now = tonumber(ARGV[1])
if not now then
  local time = redis.call('TIME')
  now = time[1] * 1000000 + time[2]
end

local function int(number)
  return string.format('%.0f', number)
end

-- Ids are at least the time, so they ascend even if this server lost its memory, or its last steps
-- in a fail-over.
local sequence = tonumber(redis.call('GET', SEQUENCE) or '0')

-- Drops the oldest parts. Only this server knows what a record takes, up to twice its bytes.
local function end_part()
  redis.call('SET', PART, 0)
  redis.call('RPUSH', PARTS, int(sequence))
  while redis.call('MEMORY', 'USAGE', LOG, 'SAMPLES', 0) > LOG_BYTES - 2 * PART_BYTES do
    redis.call('XTRIM', LOG, 'MINID', int(tonumber(redis.call('LPOP', PARTS)) + 1))
  end
end

local function append(...)
  local before = int(sequence)
  sequence = math.max(sequence + 1, now)
  redis.call('SET', SEQUENCE, int(sequence))
  redis.call('XADD', LOG, int(sequence) .. '-0', 'after', before, ...)
  local bytes = 64
  for _, value in ipairs({...}) do
    bytes = bytes + #value
  end
  if redis.call('INCRBY', PART, bytes) > PART_BYTES then
    end_part()
  end
end

if sequence == 0 then
  append('kind', 'begin')
  redis.call('SET', CHANGED, int(sequence))
end

local function read_member(id)
  local packed = redis.call('HGET', INSTANCES, id)
  return packed and cmsgpack.unpack(packed)
end

-- True if more may have expired than was ended. Each step then checks what it comes upon.
local backlog = false

local function ran_out(kind, id)
  local deadline = backlog and redis.call('ZSCORE', EXPIRIES, kind .. id)
  return deadline and tonumber(deadline) <= now
end

local function save(id, member)
  redis.call('HSET', INSTANCES, id, cmsgpack.pack(member))
end

-- The lease as a worker gets it: epoch, state, role, reserved transfers and blocks, and the
-- microseconds that are left to it if it drains.
local function lease_of(member)
  local left = ''
  if member.drain_deadline then
    left = int(math.max(member.drain_deadline * 1000000 - now, 0))
  end
  return {'ok', int(member.epoch), member.state, member.role, int(member.reserved.transfers),
    int(member.reserved.blocks), left}
end

local function change(cause, id, member)
  local packed, spec = cmsgpack.pack(member), redis.call('HGET', SPECS, id)
  append('kind', 'change', 'cause', cause, 'instance', id, 'member', packed, 'spec', spec)
  local before = redis.call('GET', CHANGED)
  redis.call('SET', CHANGED, int(sequence))
  redis.call('XADD', CHANGES, 'MAXLEN', '=', CHANGES_LENGTH, int(sequence) .. '-0',
    'after', before, 'cause', cause, 'instance', id, 'member', packed, 'spec', spec)
end

-- The sides of a transfer: one if one instance serves the request alone.
local function sides_of(transfer)
  if transfer.prefill.instance_id == transfer.decode.instance_id then
    return {{party = transfer.prefill, blocks = transfer.prefill_blocks, decodes = true}}
  end
  return {
    {party = transfer.prefill, blocks = transfer.prefill_blocks},
    {party = transfer.decode, blocks = transfer.decode_blocks, decodes = true},
  }
end

local function end_transfer(id, reason)
  for _, side in ipairs(sides_of(cmsgpack.unpack(redis.call('HGET', TRANSFERS, id)))) do
    local name = side.party.instance_id
    local member = read_member(name)
    member.reserved.transfers = member.reserved.transfers - 1
    member.reserved.blocks = member.reserved.blocks - side.blocks
    if side.decodes and reason == 'released' then
      member.started = (member.started or 0) + 1
    end
    save(name, member)
    redis.call('SREM', HELD .. name, id)
  end
  redis.call('HDEL', TRANSFERS, id)
  redis.call('HDEL', TABLES, id)
  redis.call('HDEL', ASKED, id)
  redis.call('ZREM', EXPIRIES, 't' .. id)
  redis.call('HINCRBY', COUNTS, reason, 1)
  append('kind', 'end', 'transfer', id, 'reason', reason)
end

-- The fields of an instance in `blocks`.
local function parts_of(id)
  local fields = {}
  for part = 0, 15 do
    fields[part + 1] = string.format('%s:%x', id, part)
  end
  return fields
end

local function remove(id, cause)
  for _, transfer in ipairs(redis.call('SMEMBERS', HELD .. id)) do
    end_transfer(transfer, 'instance-gone')
  end
  local member = read_member(id)
  member.state = 'gone'
  change(cause, id, member)
  redis.call('HDEL', INSTANCES, id)
  redis.call('HDEL', SPECS, id)
  redis.call('HDEL', BLOCKS, id, unpack(parts_of(id))) -- the first is of an older version
  redis.call('HDEL', SENT, id)
  redis.call('HDEL', ZONES, id)
  redis.call('ZREM', EXPIRIES, 'i' .. id)
end

local function expire(id)
  remove(id, 'lease-expired')
  redis.call('HINCRBY', COUNTS, 'leases_expired', 1)
end

-- The member of a live instance.
local function member_of(id)
  if ran_out('i', id) then
    expire(id)
    return nil
  end
  return read_member(id)
end

-- The member of an instance that lives under an epoch, for a caller that showed a secret
-- (scheduler/registry.py); else nil and the refusal. ANY asks for no secret.
local ANY = '-'

local function refused_secret(id, member, shown)
  if shown == ANY or (member.secret or '') == '' or member.secret == shown then
    return nil
  end
  return {'wrong-secret', id, shown}
end

local function living(id, epoch, shown)
  local member = member_of(id)
  if not member or int(member.epoch) ~= epoch then
    return nil, {'stale', id, epoch, member and int(member.epoch) or ''}
  end
  return member, refused_secret(id, member, shown)
end

-- The open transfer as msgpack.
local function transfer_of(id)
  local packed = redis.call('HGET', TRANSFERS, id)
  if packed and ran_out('t', id) then
    end_transfer(id, 'expired')
    return nil
  end
  if packed and backlog then
    for _, side in ipairs(sides_of(cmsgpack.unpack(packed))) do
      if not member_of(side.party.instance_id) then
        return nil
      end
    end
  end
  return packed
end

-- Writes the record of an update. `lapsed` is its record after its lease ends, empty if it has
-- ended. The replica that takes the step makes the records.
local function put_update(packed, lapsed, lease)
  local update = cmsgpack.unpack(packed)
  local id = update.update_id
  redis.call('HSET', UPDATES, id, packed)
  if lapsed ~= '' then
    redis.call('HSET', UPDATING, update.model, id)
    redis.call('HSET', LAPSES, id, lapsed)
    redis.call('ZADD', EXPIRIES, int(now + lease), 'w' .. id)
  elseif redis.call('HDEL', LAPSES, id) == 1 then
    redis.call('HDEL', UPDATING, update.model)
    redis.call('ZREM', EXPIRIES, 'w' .. id)
    redis.call('ZADD', ENDED, int(now), id)
    redis.call('HINCRBY', COUNTS, 'updates_' .. update.state, 1)
  end
  append('kind', 'update', 'update', packed)
end

local function lapse(id)
  put_update(redis.call('HGET', LAPSES, id), '')
end

local function drop_update(id)
  redis.call('HDEL', UPDATES, id)
  append('kind', 'no-update', 'update', id)
end

-- Moves the deadlines of `entries` by `time`, a bounded number with each ZADD.
local function put_off(entries, time)
  for i = 1, #entries, 1000 do
    local moved = {}
    for at = i, math.min(i + 999, #entries), 2 do
      moved[#moved + 1] = int(entries[at + 1] + time)
      moved[#moved + 1] = entries[at]
    end
    redis.call('ZADD', EXPIRIES, unpack(moved))
  end
end

-- Shortly after a silence, most of the fleet or of a zone may be late because of what caused it. A
-- worker is late if it missed a heartbeat. The late ones then get one more lease, once
-- (lease_guard.py). Returns whether any did.
local function spare()
  local unwell = tonumber(redis.call('GET', UNWELL) or '0')
  if now > unwell + 2 * LEASE then
    return false
  end
  local late = {}
  local due = redis.call('ZRANGEBYSCORE', EXPIRIES, '-inf', int(now + LEASE / 2), 'WITHSCORES')
  for i = 1, #due, 2 do
    if due[i]:sub(1, 1) == 'i' then
      late[#late + 1] = due[i]
      late[#late + 1] = due[i + 1]
    end
  end
  if #late < 2 * MASS then
    return false
  end
  if #late <= redis.call('HLEN', INSTANCES) then
    local zones, all, missed = {}, {}, {}
    local known = redis.call('HGETALL', ZONES)
    for i = 1, #known, 2 do
      zones['i' .. known[i]] = known[i + 1]
      all[known[i + 1]] = (all[known[i + 1]] or 0) + 1
    end
    for i = 1, #late, 2 do
      local zone = zones[late[i]]
      if zone then
        missed[zone] = (missed[zone] or 0) + 1
      end
    end
    local of_zones = {}
    for i = 1, #late, 2 do
      local zone = zones[late[i]]
      if zone and missed[zone] >= MASS and 2 * missed[zone] > all[zone] then
        of_zones[#of_zones + 1] = late[i]
        of_zones[#of_zones + 1] = late[i + 1]
      end
    end
    late = of_zones
  end
  if #late == 0 then
    return false
  end
  redis.call('DEL', UNWELL)
  put_off(late, LEASE)
  redis.call('HINCRBY', COUNTS, 'leases_spared', #late / 2)
  append('kind', 'spared', 'leases', int(#late / 2))
  return true
end

-- While no step was taken no lease could be renewed: this server or all replicas were down, or its
-- clock was set. That time does not count against the workers.
local seen = tonumber(redis.call('GET', SEEN) or int(now))
local silence = now - seen
if silence > SILENCE then
  local leases = {}
  local entries = redis.call('ZRANGE', EXPIRIES, 0, -1, 'WITHSCORES')
  for i = 1, #entries, 2 do
    if entries[i]:sub(1, 1) ~= 't' then
      leases[#leases + 1] = entries[i]
      leases[#leases + 1] = entries[i + 1]
    end
  end
  put_off(leases, silence)
  redis.call('SET', UNWELL, int(now))
end
if silence == 0 or silence > 100000 or silence < 0 then
  redis.call('SET', SEEN, int(now))
end

local removed, may_spare = 0, true
for _, entry in ipairs(
  redis.call('ZRANGEBYSCORE', EXPIRIES, '-inf', int(now), 'LIMIT', 0, PORTION)
) do
  local kind, id = entry:sub(1, 1), entry:sub(2)
  if kind == 'i' and may_spare then
    may_spare = false
    if spare() then
      backlog = true
      break
    end
  end
  if kind == 'i' then
    removed = removed + redis.call('SCARD', HELD .. id)
    expire(id)
  elseif kind == 'w' then
    lapse(id)
  elseif redis.call('HEXISTS', TRANSFERS, id) == 1 then
    end_transfer(id, 'expired')
  end
  removed = removed + 1
  if removed >= PORTION then
    backlog = true
    break
  end
end
