-- ARGV: [4] id, [5] epoch.
local id, epoch = ARGV[4], ARGV[5]

local member = member_of(id)
if not member then
  return {'unknown-instance'}
end
if int(member.epoch) ~= epoch then
  return {'stale', id, epoch, int(member.epoch)}
end
remove(id, 'deregistered')
return {'ok'}
