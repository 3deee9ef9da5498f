-- ARGV: [5] id, [6] epoch.
local id, epoch = ARGV[5], ARGV[6]

local member = member_of(id)
if not member then
  return {'unknown-instance'}
end
if int(member.epoch) ~= epoch then
  return {'stale', id, epoch, int(member.epoch)}
end
remove(id, 'deregistered')
return {'ok'}
