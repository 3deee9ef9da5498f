-- ARGV: [5] id, [6] role. Returns the member and its spec.
local id, role = ARGV[5], ARGV[6]

local member = member_of(id)
if not member then
  return {'unknown-instance'}
end
if member.role ~= role then
  member.role = role
  save(id, member)
  change('role-changed', id, member)
end
return {'ok', cmsgpack.pack(member), redis.call('HGET', SPECS, id)}
